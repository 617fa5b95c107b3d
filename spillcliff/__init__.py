"""What the commands probe, plan and train share. Nothing here imports torch when it is imported."""

__version__ = "0.2.0"
