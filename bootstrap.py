"""Sets spillcliff up in .venv beside this file and runs it. Standard library only.

    python3 bootstrap.py         set up
    python3 bootstrap.py demo    set up, then the whole chain on this machine
    python3 bootstrap.py test    set up, then the tests
"""

import glob
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(ROOT, ".venv")
STAMP = os.path.join(VENV, "spillcliff.json")
LOG = os.path.join(VENV, "install.log")
PYTHON = os.path.join(VENV, "Scripts", "python.exe") if os.name == "nt" else os.path.join(VENV, "bin", "python")
OLDEST = (3, 11)
UNKNOWN = (0, 0)
OLDEST_CARD = (5, 0)
NEWEST_CUDA_12_6 = (9, 0)


def fail(message):
    print("error: " + message, file=sys.stderr)
    sys.exit(2)


def nvidia_smis():
    """Where nvidia-smi may be: on the path, or where WSL, Windows and some containers keep it without that."""
    windows = os.environ.get("SYSTEMROOT", "C:\\Windows")
    folders = ["/usr/lib/wsl/lib", "/usr/local/nvidia/bin", "/opt/nvidia/bin"]
    if os.name == "nt":  # Sysnative is what a 32-bit Python calls System32
        folders = [os.path.join(windows, name) for name in ("System32", "Sysnative")]
        folders += [os.path.join(os.environ.get(name, "C:\\Program Files"), "NVIDIA Corporation", "NVSMI")
                    for name in ("PROGRAMW6432", "PROGRAMFILES")]
        folders += glob.glob(os.path.join(windows, "System32", "DriverStore", "FileRepository", "nv*"))
    found = [shutil.which("nvidia-smi")] + [shutil.which("nvidia-smi", path=folder) for folder in folders]
    return [exe for i, exe in enumerate(found) if exe and exe not in found[:i]]


def card_capabilities():
    """Compute capabilities of the cards here, such as [(6, 1)]; UNKNOWN for one that can't be told, [] without a card."""
    answer = None
    for exe in nvidia_smis():
        answer = ask_nvidia_smi(exe) or answer
        if answer and set(answer) != {UNKNOWN}:
            break
    return answer or []


def ask_nvidia_smi(exe, seconds=60):
    """As card_capabilities. Its output goes to a file and it is not waited for once it is late: one that hangs in the driver
    can't even be killed."""
    with tempfile.TemporaryFile() as out:
        try:
            process = subprocess.Popen([exe, "--query-gpu=compute_cap", "--format=csv,noheader"], stdin=subprocess.DEVNULL,
                                       stdout=out, stderr=subprocess.STDOUT)
            process.wait(seconds)
        except OSError:
            return []
        except subprocess.TimeoutExpired:
            process.kill()
            print("%s did not answer within %d s: the driver hangs; restart the machine" % (exe, seconds), flush=True)
            return [UNKNOWN]
        out.seek(0)
        text = out.read().decode("utf-8", "replace")
    if "version mismatch" in text.lower():
        print("the NVIDIA driver was updated and the old one still runs: restart the machine, or nothing runs on its card",
              flush=True)
    return parse_capabilities(text)


def parse_capabilities(text):
    """What nvidia-smi printed for compute_cap; see card_capabilities."""
    found = []
    for line in text.splitlines():
        major, dot, minor = line.strip().partition(".")
        if dot and major.isdigit() and minor.isdigit():
            found.append((int(major), int(minor)))
        elif line.strip().startswith("["):  # [N/A], [Not Supported], [Unknown Error]
            found.append(UNKNOWN)
    # the field is older than no driver since 2022; a driver that doesn't match its library has a card
    if not found and any(words in text.lower() for words in ("not a valid field", "version mismatch")):
        found.append(UNKNOWN)
    return found


def lowest(capabilities):
    """The one that decides on the build: the lowest that any build runs; None without a card, UNKNOWN if none is told."""
    told = [c for c in capabilities if c != UNKNOWN]
    return min([c for c in told if c >= OLDEST_CARD] or told or capabilities or [None])


def cant_run(build, capabilities):
    """What the chosen build can't run of the cards here, as one line; "" if it runs all whose capability is told."""
    is_cu126 = any("/cu126" in argument for argument in build)
    lines = []
    for major, minor in sorted({c for c in capabilities if c != UNKNOWN}):
        card = "the card of compute capability %d.%d" % (major, minor)
        if (major, minor) < OLDEST_CARD:
            lines.append("no build that this needs runs %s" % card)
        elif is_cu126 and (major, minor) > NEWEST_CUDA_12_6:
            lines.append("the CUDA 12.6 build can't run %s, and no build runs both it and one below 7.5; to use it instead: "
                         "%s -m pip install --upgrade torch --index-url https://download.pytorch.org/whl/cu130"
                         % (card, PYTHON))
    return "; ".join(lines)


def choose_build(capability, windows):
    """(pip arguments, why) of the torch build for the lowest capability on this machine."""
    below = "torch>=2.10,<2.15"
    cu126 = ["--index-url", "https://download.pytorch.org/whl/cu126", "--extra-index-url", "https://pypi.org/simple"]
    if capability is None:
        return ["torch>=2.10"], "no NVIDIA card seen: the default torch build"
    if capability < (7, 5):
        seen = "of unknown compute capability" if capability == UNKNOWN else "of compute capability %d.%d" % capability
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


def is_ready(stamp, any_build=False):
    """Whether that is set up; with `any_build` whatever build of torch it has."""
    try:
        with open(STAMP) as f:
            noted = json.load(f)
        if any_build:
            noted["build"] = stamp["build"]
        return noted == stamp and os.path.exists(PYTHON)
    except (OSError, ValueError, TypeError):
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
    capabilities = card_capabilities()
    capability = lowest(capabilities)
    build, why = choose_build(capability, os.name == "nt")
    stamp = wanted_stamp(build)
    # a driver that doesn't answer today is no reason to install another build over the one that is there
    if is_ready(stamp, any_build=capability in (None, UNKNOWN)):
        return
    print(why, flush=True)
    problem = cant_run(build, capabilities)
    if problem:
        print("note: " + problem, flush=True)
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
