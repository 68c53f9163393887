"""Actuators, which start and stop processes, by their own reports: one per host, or one for a cluster.

The scheduler gives an actuator a state, never an order (`DesiredProcesses`), so that a lost or repeated message does
nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdmesh.core.mesh_state import MeshState
from pdmesh.core.operator_events import ActuatorLost, ActuatorReported
from pdmesh.model import InstanceId, InstanceProfile
from pdmesh.operations import ManagedProcess, PoolMember, ProcessKind

_BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}


class Actuators:
    """The present actuators, at most one for each prefix of names."""

    def __init__(self, mesh: MeshState) -> None:
        self._mesh = mesh
        # The last report of each actuator by its prefix of names; the lost ones' prefixes.
        self._reports: dict[str, ActuatorReported] = {}
        self._lost: set[str] = set()
        # Time of the last report of any actuator.
        self.heard_s = 0.0

    # --- events ---

    def reported(self, event: ActuatorReported, now_s: float) -> None:
        """Note the processes that an actuator reports. It takes the place of an earlier one with the same prefix."""
        self._reports[event.name_prefix] = event
        self._lost.discard(event.name_prefix)
        self.heard_s = now_s

    def lost(self, event: ActuatorLost) -> None:
        """Stop relying on an actuator, though its processes may run on."""
        self._lost |= {prefix for prefix, each in self._reports.items() if each.actuator_id == event.actuator_id}

    # --- state ---

    def why_not(self, actuator_id: str, name_prefix: str) -> str | None:
        """Return why an actuator may not manage the processes with ``name_prefix``; None if it may.

        A prefix belongs to the actuator that reported it last, until that actuator is lost.
        """
        other = self._reports.get(name_prefix)
        if other is None or name_prefix in self._lost or other.actuator_id == actuator_id:
            return None
        return "another supervisor already manages the pools of this mesh"

    @property
    def there(self) -> Sequence[ActuatorReported]:
        """Last reports of the actuators that are not lost."""
        return [report for prefix, report in self._reports.items() if prefix not in self._lost]

    @property
    def instance_ids(self) -> Sequence[InstanceId]:
        """Instances that actuators keep running."""
        return [
            InstanceId(each.name)
            for report in self.there
            for each in report.processes
            if each.kind is ProcessKind.INSTANCE
        ]

    @property
    def services(self) -> Sequence[ManagedProcess]:
        """Other processes that actuators keep running."""
        processes = (each for report in self.there for each in report.processes)
        return [each for each in processes if each.kind is not ProcessKind.INSTANCE]

    @property
    def processes(self) -> Sequence[ManagedProcess]:
        """All processes that actuators keep running."""
        return [each for report in self.there for each in report.processes]

    @property
    def away(self) -> Sequence[InstanceId]:
        """Instances that actuators keep running, and that are not registered."""
        return [each for each in self.instance_ids if each not in self._mesh.instances]

    @property
    def coming(self) -> set[InstanceId]:
        """Instances that served, are away, and whose processes are started again."""
        named = {instance_id for report in self.there for instance_id in report.coming}
        return {name for name in named if name not in self._mesh.instances or not self._mesh.instances[name].reachable}

    def may_run(self, instance_id: InstanceId) -> bool:
        """Whether a process of the instance may exist, so that its memory is not free. True before any report."""
        reports = self._reports.values()
        named = (instance_id in report.unsettled or _runs(report, instance_id) for report in reports)
        return not reports or any(named)

    def leaves_last(self, instance_id: InstanceId) -> int:
        """Return a sort key: instances with a lower key must leave earlier.

        If the actuator stops the highest number first, the key is minus the number in ``instance_id``, else 0.
        """
        return -number_of(instance_id)[1] if self._is_ordered(instance_id) else 0

    def why_stays(self, leaves: Sequence[InstanceId]) -> str | None:
        """Return why these instances cannot leave while others stay; None if they can."""
        for instance_id in leaves:
            if not self._is_ordered(instance_id):
                continue
            stem, number = number_of(instance_id)
            for other in self.instance_ids:
                if other not in leaves and number_of(other)[0] == stem and number_of(other)[1] > number:
                    return (
                        f"{instance_id} can leave only after {other}, which has another role: change that first "
                        f"(`pdmesh role`)"
                    )
        return None

    def grace_s(self, leaves: Sequence[InstanceId]) -> float:
        """Return how long these processes may take to end by themselves, once told."""
        homes = [home for each in leaves if (home := self.home_of(each)) is not None]
        return max((home.grace_s for home in homes), default=0.0)

    def replaces(self, instance_id: InstanceId) -> bool:
        """Whether the actuator itself must end the process of an instance under restart."""
        return any(instance_id in report.outdated for report in self.there)

    def _is_ordered(self, instance_id: InstanceId) -> bool:
        home = self.home_of(instance_id)
        return home is not None and home.last_leaves_first

    # --- starts ---

    def home_of(self, instance_id: InstanceId) -> ActuatorReported | None:
        """Return the actuator with the longest prefix that matches the instance, to start it; None if none matches."""
        fitting = [report for report in self.there if instance_id.startswith(report.name_prefix)]
        return max(fitting, key=lambda report: len(report.name_prefix), default=None)

    def prefixes(self) -> Iterator[str]:
        """Yield the name prefix of each further instance, without end: always where most memory is left."""
        left = {report.name_prefix: report.available_bytes for report in self.there} or {"": 0}
        while True:
            prefix = max(left, key=lambda each: left[each])
            left[prefix] -= self.instance_bytes
            yield prefix

    def why_no_memory(self, starts: Sequence[PoolMember]) -> str | None:
        """Return why these instances cannot be started; None if there is memory for them."""
        for report in self.there:
            number = sum(self.home_of(member.instance_id) is report for member in starts)
            num_bytes = number * self.instance_bytes
            if num_bytes > report.available_bytes:
                return (
                    f"{number} more instances need about {num_bytes / 2**30:.1f} GiB of memory, and "
                    f"{report.available_bytes / 2**30:.1f} GiB are free"
                )
        return None

    @property
    def instance_bytes(self) -> int:
        """Largest amount of host memory, in bytes, that another instance takes."""
        return max((host_bytes(each.profile) for each in self._mesh.instances.values()), default=0)


def number_of(instance_id: InstanceId) -> tuple[str, int]:
    """Return an instance's name without the number behind its last dash, and that number; -1 if it has none."""
    stem, _, number = instance_id.rpartition("-")
    return (stem, int(number)) if number.isdecimal() and len(number) < 10 else (instance_id, -1)


def _runs(report: ActuatorReported, instance_id: InstanceId) -> bool:
    return any(each.name == instance_id for each in report.processes)


def host_bytes(profile: InstanceProfile) -> int:
    """Return the bytes of host memory for another such instance's weights and KV; 0 if it uses a device."""
    if profile.device != "cpu":
        return 0
    layout = profile.kv_layout
    return profile.num_blocks * layout.bytes_per_block + profile.num_parameters * _BYTES_OF.get(layout.dtype, 4)
