"""Sets spillcliff up in .venv beside this file and runs it. Standard library only.

    python3 bootstrap.py         set up
    python3 bootstrap.py demo    set up, then the whole chain on this machine
    python3 bootstrap.py test    set up, then the tests
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(ROOT, ".venv")
STAMP = os.path.join(VENV, "spillcliff.json")
LOG = os.path.join(VENV, "install.log")
PYTHON = os.path.join(VENV, "Scripts", "python.exe") if os.name == "nt" else os.path.join(VENV, "bin", "python")
OLDEST = (3, 11)


def fail(message):
    print("error: " + message, file=sys.stderr)
    sys.exit(2)


def card_capability():
    """The lowest compute capability among the cards that nvidia-smi lists, as (6, 1); None without a card; (0, 0) where
    the driver is too old to tell."""
    exe = shutil.which("nvidia-smi")
    if exe is None:
        return None
    try:
        query = [exe, "--query-gpu=compute_cap", "--format=csv,noheader"]
        done = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_capability(done.returncode, done.stdout.decode("utf-8", "replace"))


def parse_capability(code, text):
    """What nvidia-smi printed for compute_cap, to the lowest capability; see card_capability."""
    found = []
    for line in text.splitlines():
        major, dot, minor = line.strip().partition(".")
        if dot and major.isdigit() and minor.isdigit():
            found.append((int(major), int(minor)))
    if found:
        return min(found)
    return (0, 0) if "not a valid field" in text.lower() else None


def choose_build(capability, windows):
    """(pip arguments, why) of the torch build for the lowest capability on this machine."""
    below = "torch>=2.10,<2.15"
    cu126 = ["--index-url", "https://download.pytorch.org/whl/cu126", "--extra-index-url", "https://pypi.org/simple"]
    if capability is None:
        return ["torch>=2.10"], "no NVIDIA card seen: the default torch build"
    if capability < (7, 5):
        seen = "of unknown compute capability" if capability == (0, 0) else "of compute capability %d.%d" % capability
        return [*cu126, below], "card %s: the CUDA 12.6 build, the last with kernels below 7.5" % seen
    why = "card of compute capability %d.%d: the default torch build" % capability
    if windows:  # the default index has only processor builds for Windows
        return (["--index-url", "https://download.pytorch.org/whl/cu130", "--extra-index-url", "https://pypi.org/simple",
                 "torch>=2.10"], why + " (CUDA 13)")
    return ["torch>=2.10"], why


def wanted_stamp(build):
    """What a finished set-up would have noted: if it is there, nothing needs doing."""
    files = hashlib.sha256()
    for name in ("setup.cfg", "pyproject.toml", "constraints.txt"):
        with open(os.path.join(ROOT, name), "rb") as f:
            files.update(f.read())
    return {"files": files.hexdigest(), "build": build, "python": sys.version.split()[0], "root": ROOT}


def is_ready(stamp):
    try:
        with open(STAMP) as f:
            return json.load(f) == stamp and os.path.exists(PYTHON)
    except (OSError, ValueError):
        return False


def run_logged(what, command):
    """Runs a command with its output in the log, showing the seconds; returns whether it succeeded."""
    begin, terminal = time.time(), sys.stdout.isatty()
    print(what + " ...", end="" if terminal else "\n", flush=True)
    with open(LOG, "ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            while process.poll() is None:
                time.sleep(0.5)
                if terminal:
                    print("\r%s ... %d s" % (what, time.time() - begin), end="", flush=True)
        except KeyboardInterrupt:
            process.kill()
            process.wait()
            raise
    if terminal:
        print()
    return process.returncode == 0


def why_pip_failed():
    """The cause of the last failure in pip's log, as one sentence that says what to do."""
    with open(LOG, encoding="utf-8", errors="replace") as f:
        text = f.read()[-20000:]
    see = "; the whole story is in " + LOG
    if any(s in text for s in ("NewConnectionError", "Temporary failure in name resolution", "ConnectTimeoutError",
                               "getaddrinfo failed", "ProxyError", "Network is unreachable")):
        return "the package index can't be reached: check the network (or HTTPS_PROXY) and run this again" + see
    if "No space left on device" in text or "not enough space" in text:
        return "the disk is full: torch takes 1 to 7 GB; make room and run this again" + see
    errors = [line for line in text.splitlines() if line.startswith("ERROR")]
    return "pip could not install: " + (errors[-1] if errors else "no reason given") + see


def make_venv():
    if shutil.which(PYTHON) is None:
        shutil.rmtree(VENV, ignore_errors=True)
        done = subprocess.run([sys.executable, "-m", "venv", VENV], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode or not os.path.exists(PYTHON):
            shutil.rmtree(VENV, ignore_errors=True)
            if b"ensurepip" in done.stdout or b"No module named venv" in done.stdout:
                fail("this Python has no venv module; on Debian and Ubuntu: apt install python%d.%d-venv"
                     % sys.version_info[:2])
            lines = done.stdout.decode("utf-8", "replace").strip().splitlines() or ["no reason given"]
            fail("could not make %s: %s" % (VENV, lines[-1]))


def set_up():
    if sys.version_info < OLDEST:
        fail("Python %d.%d or later is needed and this is %s; install one and call it by name, such as python3.12 "
             "bootstrap.py (Windows: py -3.12 bootstrap.py)" % (*OLDEST, sys.version.split()[0]))
    build, why = choose_build(card_capability(), os.name == "nt")
    stamp = wanted_stamp(build)
    if is_ready(stamp):
        return
    print(why, flush=True)
    make_venv()
    pip = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "-c",
           os.path.join(ROOT, "constraints.txt")]
    for what, arguments in (("installing torch (1 to 7 GB)", build), ("installing spillcliff", ["-e", ROOT + "[test]"])):
        if not run_logged(what, pip + arguments):
            fail(why_pip_failed())
    with open(STAMP, "w") as f:
        json.dump(stamp, f)
    print("ready: %s" % os.path.dirname(PYTHON), flush=True)


def main():
    arguments = sys.argv[1:]
    commands = {"demo": ["demo.py"], "test": ["-m", "pytest"]}
    if arguments and arguments[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    if arguments and arguments[0] not in commands:
        fail("%r is unknown; it is demo, test or nothing" % arguments[0])
    set_up()
    if arguments:
        return subprocess.call([PYTHON] + commands[arguments[0]] + arguments[1:], cwd=ROOT)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
