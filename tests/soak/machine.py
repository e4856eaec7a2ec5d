"""The soak itself: what may happen to a node, and what must hold whenever nothing is under way."""

import collections

import structlog
from hypothesis import stateful
from hypothesis import strategies as st

from mig_manager import errors, reconcile
from mig_manager.core import cluster, model
from mig_manager.sandbox.driver import states
from tests import fakes
from tests.soak import cluster as soak_cluster
from tests.soak import driver, layouts, process, script

SPECS = (
    "A100-SXM4-40GB",
    "2xA100-SXM4-40GB",
    "H100",
    "A30",
    "A100-SXM4-40GB+A30",
    "2xH100+A30",
)
CODES = (
    states.Code.IN_USE,
    states.Code.INSUFFICIENT_RESOURCES,
    states.Code.UNKNOWN,
    states.Code.TIMEOUT,
    states.Code.NO_PERMISSION,
    states.Code.GPU_IS_LOST,
    states.Code.RESET_REQUIRED,
    states.Code.NOT_FOUND,
)
FUNCTIONS = (
    "nvmlDeviceSetMigMode",
    "nvmlDeviceCreateGpuInstance*",
    "nvmlGpuInstanceCreateComputeInstance*",
    "nvmlGpuInstanceDestroy",
    "nvmlComputeInstanceDestroy",
    "nvmlDeviceGetGpuInstances",
    "nvmlDeviceGetMigMode",
    "nvmlInitWithFlags",
)
CONFESSED = ("failed as well", "could not be undone")
"""How a message says that the instances from before are not back."""
picks = st.integers(min_value=0, max_value=999)
names = st.sampled_from((*layouts.NAMES, layouts.NAMES[0], layouts.UNKNOWN))
many_picks = st.tuples(picks, picks, picks)
_kills = st.one_of(
    st.builds(
        script.Event,
        at=st.integers(min_value=1, max_value=35),
        kind=st.sampled_from((script.Kind.KILL_BEFORE, script.Kind.KILL_AFTER)),
    ),
    st.builds(
        script.Event,
        at=st.integers(min_value=1, max_value=14),
        kind=st.sampled_from((script.Kind.KILL_IN_DRIVER, script.Kind.KILL_AFTER_CHANGE)),
    ),
)
_happenings = st.builds(
    script.Event,
    at=st.integers(min_value=1, max_value=35),
    kind=st.sampled_from([kind for kind in script.Kind if kind not in script.DEADLY]),
    pick=picks,
)
events = st.lists(
    st.one_of(_happenings, _kills), min_size=1, max_size=4, unique_by=lambda event: event.at
)
endings = st.none() | st.builds(
    process.Interruption,
    at=st.integers(min_value=1, max_value=20),
    end=st.sampled_from(process.End),
    replacement=st.sampled_from(layouts.NAMES),
)

COUNTS: collections.Counter[str] = collections.Counter()
"""What all machines of this process did."""


class Soak(stateful.RuleBasedStateMachine):
    """A node, its agent, and everybody else."""

    def __init__(self) -> None:
        super().__init__()
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger("critical"),
            cache_logger_on_first_use=False,
        )
        self.process: process.Process | None = None
        self.is_at_rest = False
        """Whether nothing is under way: neither a run nor one that a kill cut off."""
        self.turn = process.Turn(is_killed=False, outcome=None, names=())
        self.tried: list[layouts.Layout] = []
        """What the runs were about since nothing was under way last."""
        self.applied: tuple[str, layouts.Layout] | None = None
        """The name that a success published, and what it meant then."""
        self.is_foreign = False
        """Whether somebody else has changed the GPUs since the last success."""

    @stateful.initialize(
        spec=st.sampled_from(SPECS),
        is_gated=st.booleans(),
        heals=st.booleans(),
        seeds=st.lists(many_picks, min_size=len(layouts.NAMES), max_size=len(layouts.NAMES)),
    )
    def boot(
        self,
        spec: str,
        is_gated: bool,  # noqa: FBT001 - hypothesis passes by name
        heals: bool,  # noqa: FBT001 - as above
        seeds: list[tuple[int, int, int]],
    ) -> None:
        self.world = soak_cluster.Cluster(spec, is_gated=is_gated, script_=script.Script())
        self.world.script.acts = {
            script.Kind.POD_STARTS: self.world.start_pod,
            script.Kind.POD_ENDS: self.world.end_pod,
            script.Kind.CORDON: self.world.cordon,
            script.Kind.UNCORDON: self.world.uncordon,
            script.Kind.DECIDE_MONITOR: lambda pick: self.world.decide(
                soak_cluster.MONITOR_LABEL, pick
            ),
            script.Kind.DECIDE_PLUGIN: lambda pick: self.world.decide(
                soak_cluster.PLUGIN_LABEL, pick
            ),
        }
        self.heals = heals
        self.products = [board.product.key for board in self.world.state.boards]
        self.layouts = {
            name: layouts.layout_of(self.products, seed)
            for name, seed in zip(layouts.NAMES, seeds, strict=True)
        }
        self.configs = fakes.FakeConfig(layouts.document(self.layouts))
        self.before = _sets(driver.geometry(self.world.state))
        COUNTS["nodes"] += 1
        self.wish_in_peace(layouts.NAMES[0])
        for pick in range(3):
            self.world.start_pod(pick)

    # -- what people wish

    @stateful.rule(name=names, happens=events, ending=endings)
    def wish(
        self, name: str, happens: list[script.Event], ending: process.Interruption | None
    ) -> None:
        self.world.labels[cluster.CONFIG_LABEL] = name
        self._serve(happens, ending)

    @stateful.rule(name=names, kill=_kills)
    def wish_and_kill(self, name: str, kill: script.Event) -> None:
        self.world.labels[cluster.CONFIG_LABEL] = name
        self._serve([kill], None)

    @stateful.rule(name=st.sampled_from(layouts.NAMES))
    def wish_in_peace(self, name: str) -> None:
        self.world.labels[cluster.CONFIG_LABEL] = name
        self._serve([], None)

    @stateful.rule(happens=st.one_of(st.just([]), events))
    def serve_again(self, happens: list[script.Event]) -> None:
        self._serve(happens, None)

    @stateful.rule()
    def take_the_label_away(self) -> None:
        self.world.labels.pop(cluster.CONFIG_LABEL, None)
        self._serve([], None)

    @stateful.rule(name=st.sampled_from(layouts.NAMES), seed=many_picks)
    def edit_the_file(self, name: str, seed: tuple[int, int, int]) -> None:
        if sum(seed) % 3 == 0:
            self.configs.text = layouts.BROKEN
            self._serve([], None)
        self.layouts[name] = layouts.layout_of(self.products, seed)
        self.configs.text = layouts.document(self.layouts)
        self._serve([], None)

    # -- what happens to the process and its node

    @stateful.rule()
    def restart_the_agent(self) -> None:
        self.process = None
        COUNTS["restarts"] += 1

    @stateful.rule()
    def reboot(self) -> None:
        self.process = None
        self.world.reboot()
        self._foreign_change()
        COUNTS["reboots"] += 1

    @stateful.rule(
        function=st.sampled_from(FUNCTIONS),
        code=st.sampled_from(CODES),
        first=st.integers(min_value=1, max_value=6),
        gpu=st.integers(min_value=0, max_value=2),
    )
    def arm_a_fault(self, function: str, code: states.Code, first: int, gpu: int) -> None:
        is_about_gpu = function.startswith(("nvmlDevice", "nvmlGpu", "nvmlCompute"))
        self.world.state.add_fault(
            states.Fault(
                function=function,
                gpu=gpu % len(self.products) if is_about_gpu else None,
                first=first,
                code=code,
            )
        )
        COUNTS["driver faults"] += 1

    @stateful.rule(pick=picks)
    def instance_goes_behind_our_back(self, pick: int) -> None:
        held = {device for devices in self.world.held.values() for device in devices}
        if driver.remove_behind_back(self.world.state, pick, spared=held):
            self._foreign_change()

    @stateful.rule(pick=picks, is_orphan=st.booleans())
    def instance_comes_behind_our_back(self, pick: int, is_orphan: bool) -> None:  # noqa: FBT001
        if driver.add_behind_back(self.world.state, pick, is_orphan=is_orphan):
            self._foreign_change()

    @stateful.rule()
    def look_at_rest(self) -> None:
        if self.process is None or not self.is_at_rest:
            return
        self.world.state.clear_faults()
        self.world.evicted.clear()
        self.world.messages.clear()
        self.turn = self.process.look()
        self.tried += [self.layouts[name] for name in self.turn.names if name in self.layouts]
        COUNTS["looks"] += 1
        if self.turn.names and self.turn.outcome is not None:
            self._judge(self.turn.outcome)
        assert not (self.turn.names and self.heals and self.world.evicted and self.is_foreign)
        self._judge_geometry()

    # -- what others do

    @stateful.rule(wanted=st.lists(picks, min_size=1, max_size=5))
    def pods_start(self, wanted: list[int]) -> None:
        COUNTS["pods"] += sum(map(self.world.start_pod, wanted))

    @stateful.rule(pick=picks)
    def pod_ends(self, pick: int) -> None:
        self.world.end_pod(pick)

    @stateful.rule(pick=picks)
    def stranger_starts(self, pick: int) -> None:
        self.world.start_stranger(pick)

    @stateful.rule()
    def strangers_end(self) -> None:
        self.world.end_strangers()

    @stateful.rule()
    def owner_cordons(self) -> None:
        self.world.cordon()

    @stateful.rule()
    def owner_uncordons(self) -> None:
        self.world.uncordon()

    @stateful.rule(
        key=st.sampled_from((soak_cluster.MONITOR_LABEL, soak_cluster.PLUGIN_LABEL)), pick=picks
    )
    def owner_decides(self, key: str, pick: int) -> None:
        self.world.decide(key, pick)

    @stateful.rule()
    def time_passes(self) -> None:
        self.world.clock.wait(1.0)

    # -- what must hold

    @stateful.invariant()
    def no_pod_loses_what_it_holds(self) -> None:
        COUNTS["acts"] += 1
        if hasattr(self, "world"):
            assert not self.world.violations

    @stateful.invariant()
    def at_rest_everything_is_as_its_owner_wants(self) -> None:
        if not self.is_at_rest:
            return
        world = self.world
        assert world.is_unschedulable == world.wants_cordon
        assert not world.has_hold_taint
        for key, value in world.wanted_labels.items():
            assert world.labels.get(key) == value, key
        assert cluster.JOURNAL_ANNOTATION not in world.annotations or self._is_retried()

    @stateful.invariant()
    def at_rest_the_state_is_terminal(self) -> None:
        if self.is_at_rest:
            assert process.state_of(self.world) is not model.State.PENDING

    @stateful.invariant()
    def at_rest_the_applied_label_is_true(self) -> None:
        name = hasattr(self, "world") and self.world.labels.get(cluster.APPLIED_LABEL)
        if not name or not self.is_at_rest or self.is_foreign:
            return
        assert self.applied is not None
        assert name == self.applied[0]
        assert self._differences(self.applied[1]) == []

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                self._settle()
        finally:
            driver.unload()
            structlog.reset_defaults()

    def _settle(self) -> None:
        """End all disturbance: then every layout that the GPUs can have comes into force."""
        self.world.appease()
        name = next((n for n, lay in self.layouts.items() if layouts.is_feasible(lay)), "a")
        if not layouts.is_feasible(self.layouts[name]):
            self.layouts[name] = layouts.layout_of(self.products, (0, 0, 0))
        self.configs.text = layouts.document(self.layouts)
        # The same wish as before the agent's start would not be worth an eviction.
        self.take_the_label_away()
        self.world.labels[cluster.CONFIG_LABEL] = name
        for _ in range(3):
            self._serve([], None)
            self.check_all()
            if self.turn.outcome and self.turn.outcome.state is model.State.SUCCESS:
                return
        raise AssertionError(f"undisturbed, it still ends so: {self.turn.outcome}")

    def check_all(self) -> None:
        self.no_pod_loses_what_it_holds()
        self.at_rest_everything_is_as_its_owner_wants()
        self.at_rest_the_state_is_terminal()
        self.at_rest_the_applied_label_is_true()

    # -- one turn of the agent, and what it must leave behind

    def _serve(self, happens: list[script.Event], ending: process.Interruption | None) -> None:
        world = self.world
        world.gone_devices.clear()
        world.messages.clear()
        world.told.clear()
        world.evicted.clear()
        if self.process is None:
            self.process = process.Process(world, self.configs, heals=self.heals)
        self.turn = self.process.turn(happens, ending)
        self.is_at_rest = not self.turn.is_killed
        COUNTS["runs"] += len(self.turn.names)
        COUNTS["kills"] += self.turn.is_killed
        COUNTS["happenings"] += len(world.script.happened)
        if self.turn.is_killed or (self.turn.outcome is None and ending):
            self.process = None
        self.tried += [self.layouts[name] for name in self.turn.names if name in self.layouts]
        if self.turn.outcome is not None:
            self._judge(self.turn.outcome)
        elif self.turn.is_killed:
            self._take_note()
        if self.is_at_rest:
            self._judge_geometry()

    def _judge(self, outcome: reconcile.Outcome) -> None:
        COUNTS[outcome.reason.value] += 1
        assert outcome.reason is not errors.Reason.INTERNAL, outcome.message
        assert process.state_of(self.world) is outcome.state
        if outcome.state is model.State.SUCCESS:
            self._judge_success(self.world.labels[cluster.CONFIG_LABEL])

    def _judge_geometry(self) -> None:
        """Find the GPUs as before, or as one of those wished for who was served."""
        now = driver.geometry(self.world.state)
        told = (self.turn.outcome.message if self.turn.outcome else "", *self.world.messages)
        if any(words in text for words in CONFESSED for text in told):
            self._also(now)
            return
        for index, found in enumerate(now):
            is_wanted = any(
                not self._differences((*(None,) * index, layout[index])) for layout in self.tried
            )
            assert is_wanted or found in self.before[index], (index, told)
        self.before = _sets(now)
        self.tried.clear()

    def _also(self, now: driver.Geometry) -> None:
        for known, found in zip(self.before, now, strict=True):
            known.add(found)

    def _take_note(self) -> None:
        """Find that a success was told before the kill, and see whether it is one."""
        name = self.turn.names[-1] if self.turn.names else ""
        if any(text.startswith(f"Layout {name} is ") for text in self.world.told[-1:]):
            self.applied, self.is_foreign = (name, self.layouts[name]), False
            assert self._differences(self.layouts[name]) == []

    def _judge_success(self, name: str) -> None:
        layout = self.layouts[name]
        assert self._differences(layout) == []
        self.applied, self.is_foreign = (name, layout), False
        if self.world._plugins():
            offered = {uuid for ids in self.world.offered.values() for uuid in ids}
            there = driver.devices(self.world.state)
            assert offered == there.keys(), (self.turn.outcome, self.world.offered, there)
        if not self.world.script.happened and len(self.turn.names) == 1:
            for uid, devices in self.world.evicted.items():
                assert devices & self.world.gone_devices, f"{uid} was evicted in vain"

    def _differences(self, layout: layouts.Layout) -> list[str]:
        """Compare with the GPUs by counting."""
        found = []
        for index, choice in enumerate(layout):
            if choice is None:
                continue
            has = driver.counted(self.world.state, index)
            if has != (None if choice.devices is None else collections.Counter(choice.devices)):
                found.append(f"GPU {index}: {choice.devices} wanted, {has} there")
            gpu = self.world.state.read().gpus[index]
            if gpu.is_pending is not gpu.is_enabled:
                found.append(f"GPU {index}: its mode waits for a reset")
            if any(not instance.compute_instances for instance in gpu.instances):
                found.append(f"GPU {index}: an instance lies idle")
        return found

    def _is_retried(self) -> bool:
        # Without a wish, or at the end of the process, the next start or wish goes back.
        return self.turn.outcome is None or self.turn.outcome.should_retry

    def _foreign_change(self) -> None:
        self.is_foreign = True
        now = driver.geometry(self.world.state)
        if cluster.JOURNAL_ANNOTATION in self.world.annotations:
            self._also(now)
        else:
            self.before = _sets(now)


def _sets(geometry: driver.Geometry) -> list[set[tuple[object, ...]]]:
    return [{gpu} for gpu in geometry]
