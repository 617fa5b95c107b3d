"""The minimal fp32 trainer: the system under test, which imports nothing else of ours."""
