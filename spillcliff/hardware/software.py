"""Which software a measurement was made with, and whether that is what runs here now. Imports no torch."""

from spillcliff.hardware import nvml
from spillcliff.hardware.fingerprints import cpu_fingerprints, slug


def same_version(one: str | None, other: str | None) -> bool:
    """Whether two versions are of the same software, as far as both tell.

    A version may have a local part behind a plus ("2.11.0+cu130", PEP 440). torch itself always names it, while the metadata
    of a package that came from PyPI does not: where one of the two lacks it, the rest decides.
    """
    if one is None or other is None:
        return one is other
    (public, _, local), (other_public, _, other_local) = (v.strip().lower().partition("+") for v in (one, other))
    return public.removeprefix("v") == other_public.removeprefix("v") and (
        not local or not other_local or local == other_local)


def installed_software(fingerprint: str) -> dict[str, str | None]:
    """{torch, driver} of this machine as they are now, without importing torch; {} if the device is another machine's."""
    from importlib import metadata

    is_card = any(slug(name) == fingerprint for card in nvml.cards()
                  for name in (card.name, *(name for _, name in card.instances or ())))
    if not is_card and fingerprint not in cpu_fingerprints():
        return {}
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = None
    return {"torch": torch, "driver": nvml.driver() if is_card else None}
