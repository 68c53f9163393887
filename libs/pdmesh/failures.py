"""Reasons why a process failed, as sentences with the fault and the remedy."""

from __future__ import annotations

import errno
import resource
import signal

from pdmesh.errors import ConfigError, PdmeshError, leaves

#: Longest sentence, in characters: a message may quote a peer or a file.
_MAX_SENTENCE = 2000

_NO_PROCESS = (
    "no thread or process can be started: a limit is reached: raise `ulimit -u` or pids.max of the control group"
)
_NO_MEMORY = "memory ran out; add memory, or lower --kv-cache-bytes, the number of instances, or the size of the model"


def sentences(error: BaseException) -> tuple[str, ...]:
    """Return one sentence for each cause: all wrong settings, else the first failure in ``error``."""
    causes = leaves(error)
    wrong_settings = tuple(str(cause) for cause in causes if isinstance(cause, ConfigError))
    on_purpose = [cause for cause in causes if isinstance(cause, PdmeshError)]
    return wrong_settings or (sentence((on_purpose or causes)[0]),)


def sentence(error: BaseException) -> str:
    """Return the sentence for one error that is no group."""
    return _told(error)[:_MAX_SENTENCE]


def _told(error: BaseException) -> str:
    message = str(error).strip()
    match error:
        case PdmeshError():
            return message
        case OSError() if error.errno is not None:
            return _of_system(error)
        case ImportError():
            return f"{message}; the installation is incomplete or does not match: run `pdmesh doctor`"
        case MemoryError():
            return _NO_MEMORY
        case RuntimeError() if "can't start new thread" in message:
            return _NO_PROCESS
        case RuntimeError() if "DefaultCPUAllocator" in message:  # raised by torch
            return _NO_MEMORY
        case _:
            first = message.splitlines()[0] if message else "no message"
            return f"{type(error).__name__}: {first}"


def _of_system(error: OSError) -> str:
    at = f" ({error.filename})" if error.filename else ""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return (
                f"no space is left on the disk{at}: free some space, or set XDG_STATE_HOME or TMPDIR to another folder"
            )
        case errno.EMFILE | errno.ENFILE:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return f"no more files can be opened{at}: the limit is {soft}; raise it, as with `ulimit -n 4096`"
        case errno.EAGAIN:
            return _NO_PROCESS
        case errno.ENOMEM:
            return _NO_MEMORY
        case _:
            return f"{error.strerror}{at}"


#: Usual causes of a signal that no process sent.
_MEANINGS = {
    signal.SIGILL: "an instruction that this processor lacks; PDMESH_WORKER_CPU_LEVEL=baseline does without",
    signal.SIGBUS: "a page of a file that is gone; is a disk or /dev/shm full?",
    signal.SIGSEGV: "a crash in native code; its log says where",
    signal.SIGFPE: "a crash in native code; its log says where",
    signal.SIGSYS: "a system call that a seccomp filter forbids",
    signal.SIGXCPU: "the limit of CPU time, `ulimit -t`",
    signal.SIGXFSZ: "the limit of a file's size, `ulimit -f`",
}


def describe_exit(returncode: int) -> str:
    """Return in words how a process ended."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        number = signal.Signals(-returncode)
    except ValueError:
        return f"was killed by signal {-returncode}"
    meaning = f" ({_MEANINGS[number]})" if number in _MEANINGS else ""
    return f"was killed by {number.name}{meaning}"
