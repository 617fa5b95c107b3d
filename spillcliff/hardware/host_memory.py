"""The memory of the machine as far as this process may use it, and what it holds of it itself. Imports no torch.

In a container the kernel still tells the whole machine's memory, and ends a process at the container's limit without a word.
Files and their meaning: docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/memory.html. All paths are under a root,
so that recorded trees can be read.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ (\S{4}) [0-9a-f]+ \S+ (\d+)\s*(.*)")


class HostMemory(NamedTuple):
    """Bytes that there are, and that are free or can be freed at once; never more free than there are."""

    total_bytes: int
    free_bytes: int


class CgroupLevel(NamedTuple):
    """One group that this process is in, in bytes: what it may hold, what it holds, and what of that is the cache of files,
    which the kernel drops when the group needs memory."""

    limit_bytes: int
    used_bytes: int
    cache_bytes: int


def host_memory(root: Path = ROOT) -> HostMemory:
    """The machine's, or what the groups of this process leave of it: the smallest on the path holds."""
    import psutil

    machine = psutil.virtual_memory()
    return within(HostMemory(machine.total, machine.available), list(cgroup_levels(root)))


def within(machine: HostMemory, levels: list[CgroupLevel]) -> HostMemory:
    """What the levels leave of the machine's memory. Unlimited is a limit beyond every machine's."""
    total = min([machine.total_bytes, *(level.limit_bytes for level in levels)])
    free = min([machine.free_bytes, *(level.limit_bytes - level.used_bytes + level.cache_bytes for level in levels)])
    return HostMemory(total, max(0, min(free, total)))


def cgroup_levels(root: Path = ROOT) -> Iterator[CgroupLevel]:
    """The groups with a limit on memory, of version 1 and 2, from this process's own to the outermost that is mounted.
    Nothing where there are none (other systems), or they can't be read."""
    mounts = [_mount(line) for line in _lines(root / "proc/self/mountinfo")]
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        is_v2 = number == "0" and not controllers
        if not is_v2 and "memory" not in controllers.split(","):
            continue
        for kind, options, mount_root, point in mounts:
            if kind == ("cgroup2" if is_v2 else "cgroup") and (is_v2 or "memory" in options):
                read = _v2_level if is_v2 else _v1_level
                yield from filter(None, map(read, _path_up(root / point.lstrip("/"), mount_root, path)))
                break


def _mount(line: str) -> tuple[str, list[str], str, str]:
    """(file system, its options, which of its folders is mounted, where) of a line of mountinfo."""
    before, _, after = line.partition(" - ")
    fields, system = before.split(), after.split()
    if len(fields) < 5 or len(system) < 3:
        return "", [], "", ""
    mount_root, point = (re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), text) for text in fields[3:5])
    return system[0], system[2].split(","), mount_root, point


def _path_up(point: Path, mount_root: str, path: str) -> list[Path]:
    """The folders of the group `path` and of those around it. A container may see its own group as the mount's root, and its
    path as the machine calls it, or as one that leads out of what it sees: then it is the mount itself."""
    inner = PurePosixPath(path)
    parts = inner.relative_to(mount_root).parts if inner.is_relative_to(mount_root) else ()
    return [point.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _v2_level(folder: Path) -> CgroupLevel | None:
    # past memory.high a group is not ended but held up until it is of no use, so that is where its memory ends
    limits = [limit for name in ("memory.max", "memory.high") if (limit := _number(folder / name)) is not None]
    return _level(limits, folder / "memory.current", folder / "memory.stat", "inactive_file")


def _v1_level(folder: Path) -> CgroupLevel | None:
    limits = [limit for limit in (_number(folder / "memory.limit_in_bytes"),
                                  _stat(folder / "memory.stat").get("hierarchical_memory_limit")) if limit is not None]
    return _level(limits, folder / "memory.usage_in_bytes", folder / "memory.stat", "total_inactive_file")


def _level(limits: list[int], used: Path, stat: Path, cache: str) -> CgroupLevel | None:
    """None without a limit."""
    if not limits or min(limits) <= 0:
        return None
    used_bytes = _number(used) or 0
    return CgroupLevel(min(limits), used_bytes, min(used_bytes, _stat(stat).get(cache, 0)))


def _lines(path: Path) -> list[str]:
    """[] for what isn't there or may not be read."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """None for "max", and for what is no number."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _stat(path: Path) -> dict[str, int]:
    pairs = [line.split() for line in _lines(path)]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def own_bytes(root: Path = ROOT) -> int:
    """What this process holds that is no part of a file, now: it would be free if the process gave it back. Pages of mapped
    files are free already, since the kernel drops them when it needs memory."""
    import psutil

    if sys.platform == "win32":
        return psutil.Process().memory_info().private
    sizes = _status(root)
    if "RssAnon" in sizes:
        return sizes["RssAnon"] + sizes.get("RssShmem", 0)
    return psutil.Process().memory_info().rss


def resident_peak_bytes(root: Path = ROOT) -> int:
    """The most that this process has held, without the pages of data files that it has mapped: those of a token file came to
    61% of a run's peak. Its libraries' pages count, as they always have in records."""
    if sys.platform == "win32":
        import psutil

        used = psutil.Process().memory_info()
        return min(used.peak_wset, used.peak_pagefile)  # the second is of private pages alone, be they resident or not
    if "VmHWM" in (sizes := _status(root)):
        # not getrusage: a process started by a larger one inherits the larger one's peak there
        return max(0, sizes["VmHWM"] - mapped_data_bytes(_lines(root / "proc/self/smaps")))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _status(root: Path) -> dict[str, int]:
    """The sizes in /proc/self/status, in bytes; {} where there is no such file."""
    fields = [line.split() for line in _lines(root / "proc/self/status")]
    return {f[0].rstrip(":"): int(f[1]) * 1024 for f in fields if len(f) == 3 and f[2] == "kB" and f[1].isdecimal()}


def mapped_data_bytes(smaps: list[str]) -> int:
    """Resident bytes of the mapped files that are no libraries (no part of which is executable) and no shared memory: pages
    as they are on the disk. `smaps` are the lines of /proc/self/smaps."""
    sizes: dict[str, int] = {}
    libraries, file = set(), ""
    for line in smaps:
        if mapping := _MAPPING.fullmatch(line):
            permissions, inode, path = mapping.groups()
            file = path if inode != "0" and not path.startswith(("/dev/", "/memfd:", "/SYSV")) else ""
            if "x" in permissions:
                libraries.add(file)
        elif file and line.startswith(("Rss:", "Anonymous:")):  # what was written to in a private mapping is its own
            kilobytes = int(line.split()[1])
            sizes[file] = sizes.get(file, 0) + (kilobytes if line.startswith("Rss:") else -kilobytes) * 1024
    return sum(size for file, size in sizes.items() if file not in libraries)
