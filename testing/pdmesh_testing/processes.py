"""Stand-in service processes for tests of the supervisor and the command line: real processes, no real service."""

from __future__ import annotations

from pathlib import Path

from pdmesh.cli.process_id import process_id

#: Announces itself, once there is no file beside the events file that ends in ``.NAME.hold``, and waits for SIGTERM;
#: ``behaviour`` makes it misbehave. It writes its actions to the events file.
_STAND_IN = """
import http.server, json, os, signal, sys, threading, time

name, events, behaviour = sys.argv[1:4]
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

def note(what):
    with open(events, "a") as file:
        file.write(f"{name} {what}\\n")

def tell(facts):
    os.write(int(os.environ["PDMESH_READY_FD"]), json.dumps(facts).encode() + b"\\n")

if behaviour == "config-error":
    tell({"failed": ["model 'nowhere' is no directory"]})
    sys.exit(2)
if behaviour == "error":
    tell({"failed": ["memory ran out"]})
    sys.exit(1)
if behaviour == "crash":
    print("terminate called", file=sys.stderr)
    sys.exit(1)
if behaviour == "illegal":
    os.kill(os.getpid(), signal.SIGILL)
facts = {"pid": os.getpid(), "address": f"127.0.0.1:{os.environ.get('PDMESH_SCHEDULER_PORT', 7001)}"}
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
port = int(os.environ.get("PDMESH_GATEWAY_PORT", 0)) if name == "gateway" else 0
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Ready)
threading.Thread(target=server.serve_forever, daemon=True).start()
if name == "gateway":
    facts["http_address"] = f"127.0.0.1:{server.server_port}"
else:
    facts["metrics_port"] = server.server_port
note("starting")
while os.path.exists(f"{events}.{name}.hold"):
    time.sleep(0.01)
if behaviour == "silent":
    os.close(int(os.environ["PDMESH_READY_FD"]))
else:
    tell(facts)
while signal.sigwait({signal.SIGTERM}) and behaviour == "stubborn":
    note("ignored SIGTERM")
note("stopped")
"""


def write_stand_in(folder: Path) -> Path:
    """Write a script to run as ``script NAME EVENTS_FILE BEHAVIOUR``.

    Behaviours: ``good``; before it serves ``config-error`` and ``error`` (says why), ``crash``, ``illegal`` (SIGILL);
    ``silent`` (never serves); ``stubborn`` (ignores SIGTERM).
    """
    script = folder / "stand_in.py"
    script.write_text(_STAND_IN)
    return script


def write_stand_in_packages(folder: Path, events: Path) -> None:
    """Write packages ``pdmesh_scheduler`` and so on that run the stand-in, for ``folder`` first in PYTHONPATH."""
    script = write_stand_in(folder)
    for service in ("scheduler", "gateway", "prefill", "decode"):
        package = folder / f"pdmesh_{service}"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(
            "import os, runpy, sys\n"
            f"name = os.environ.get('PDMESH_WORKER_INSTANCE_ID', {service!r})\n"
            f"sys.argv = [{str(script)!r}, name, {str(events)!r}, os.environ.get('STAND_IN_' + {service!r}, 'good')]\n"
            f"runpy.run_path({str(script)!r})\n"
        )


def is_running(pid: int) -> bool:
    return process_id(pid) is not None
