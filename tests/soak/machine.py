"""The soak itself: what may happen to a node, and what must hold whenever nothing is under way."""

import collections

import structlog
from hypothesis import stateful
from hypothesis import strategies as st

from mig_manager import reasons
from mig_manager.core.objects import well_known
from mig_manager.core.records import journals, run_status
from mig_manager.sandbox.driver import simulated_nvml, states
from testkit import nvml_faults
from tests.rigs.node import fake_cluster, fakes, simulated_rig, unrestored
from tests.soak import driver, layouts, process, script, soak_rig

ROLLBACK_FAILED_TEXTS = ("failed as well", "could not be rolled back", "still to restore")
"""How a message says that the former instances are not restored."""
_PORTS_OF_ROLLBACK = {"gpus", "node", "workloads", "allocations"}  # ports that a rollback calls
COUNTS: collections.Counter[str] = collections.Counter()  # what all machines of this process did


class Soak(stateful.RuleBasedStateMachine):
    """A node, its agent, and the people and programs that disturb them."""

    def __init__(self) -> None:
        super().__init__()
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger("critical"),
            cache_logger_on_first_use=False,
        )
        self.process: process.Process | None = None
        self.is_at_rest = False
        """Whether nothing is under way, nor cut off by a kill or while it was undone."""
        self.step = process.LoopStep()
        self.strikes_before: collections.Counter[int | None] = collections.Counter()
        """How often driver faults had struck before this step, by GPU."""
        self.unowned: set[tuple[int, simulated_rig.Instance]] = set()
        """Instances that others made since nothing was under way last; the agent keeps them."""
        self.tried_layouts: list[layouts.Layout] = []
        """What the runs were about since nothing was under way last."""
        self.applied_layout: tuple[str, layouts.Layout] | None = None
        """The name that a success published, and what it meant then."""
        self.is_changed_by_others = False
        """Whether another program has changed the GPUs since the last success."""

    @stateful.initialize(
        spec=st.sampled_from(script.SPECS),
        label_managed=st.booleans(),
        heals=st.booleans(),
        kill=script.kills,
        seeds=st.lists(
            script.many_picks, min_size=len(layouts.NAMES), max_size=len(layouts.NAMES)
        ),
    )
    def boot(
        self,
        spec: str,
        label_managed: bool,  # noqa: FBT001 - hypothesis passes by name
        heals: bool,  # noqa: FBT001 - as above
        kill: list[script.Strike],
        seeds: list[tuple[int, int, int]],
    ) -> None:
        self.rig = soak_rig.SoakRig(spec, label_managed=label_managed, script_=script.Script())
        self.rig.script.acts |= {
            script.StrikeKind.LABEL: lambda pick: self._label(
                layouts.NAMES[pick % len(layouts.NAMES)]
            ),
            script.StrikeKind.UNLABEL: lambda _pick: self._label(None),
        }
        self.heals = heals
        self.products = [board.product.key for board in self.rig.state.boards]
        self.layouts = {
            name: layouts.picked_layout(self.products, seed)
            for name, seed in zip(layouts.NAMES, seeds, strict=True)
        }
        self.layout_source = fakes.FakeTextSource(layouts.document(self.layouts))
        self.before: list[set[simulated_rig.GpuGeometry]] = [set() for _ in self.products]
        """How each GPU may be after a change that failed."""
        self._remember()
        COUNTS["nodes"] += 1
        self.request(layouts.NAMES[0], [])
        for pick in range(3):
            self.rig.start_pod(pick)
        # Few stories choose to kill by themselves.
        self.request(layouts.NAMES[1], kill)

    # -- what people request ------------------------------------------------------------------

    def request(self, name: str, strikes: list[script.Strike]) -> None:
        self._label(name)
        self._serve(strikes)

    request_layout = stateful.rule(name=script.names, strikes=script.any_strikes)(request)
    request_and_kill = stateful.rule(name=script.names, strikes=script.kills)(request)
    request_undisturbed = stateful.rule(
        name=st.sampled_from(layouts.NAMES), strikes=script.no_strikes
    )(request)

    @stateful.rule(name=st.sampled_from(layouts.NAMES))
    def request_from_silent_kubelet(self, name: str) -> None:
        for pick in range(5):
            self.rig.start_pod(pick)
        self.rig.silence_kubelet()
        self.request(name, [])

    @stateful.rule(strikes=st.one_of(script.no_strikes, script.any_strikes))
    def serve_again(self, strikes: list[script.Strike]) -> None:
        self._serve(strikes)

    @stateful.rule()
    def take_the_label_away(self) -> None:
        self._label(None)
        self._serve([])

    @stateful.rule(name=st.sampled_from(layouts.NAMES), seed=script.many_picks)
    def edit_the_file(self, name: str, seed: tuple[int, int, int]) -> None:
        if sum(seed) % 3 == 0:
            self._write(layouts.BROKEN)
            self._serve([])
        self.layouts[name] = layouts.picked_layout(self.products, seed)
        self._write(layouts.document(self.layouts))
        self._serve([])

    def _write(self, text: str) -> None:
        self.layout_source.text = text
        if self.process is not None:
            self.process.inbox.put_file_change()

    def _label(self, name: str | None) -> bool:
        """Return whether there was a label to write or to remove."""
        if name is None:
            return self.rig.node_object.labels.pop(well_known.CONFIG_LABEL, None) is not None
        self.rig.node_object.labels[well_known.CONFIG_LABEL] = name
        return True

    # -- what happens to the process and its node ---------------------------------------------

    @stateful.rule()
    def restart_the_agent(self) -> None:
        self._abandon()
        COUNTS["restarts"] += 1

    @stateful.rule()
    def reboot(self) -> None:
        self._abandon()
        self.rig.reboot()
        self._note_other_change()
        COUNTS["reboots"] += 1

    @stateful.rule(
        function=st.sampled_from(script.FUNCTIONS),
        code=st.sampled_from(script.CODES),
        first=st.integers(min_value=1, max_value=6),
        gpu=st.integers(min_value=0, max_value=2),
    )
    def arm_a_fault(self, function: str, code: states.Code, first: int, gpu: int) -> None:
        is_about_gpu = function.startswith(("nvmlDevice", "nvmlGpu", "nvmlCompute"))
        self.rig.state.add_fault(
            nvml_faults.Fault(
                function=function,
                gpu=gpu % len(self.products) if is_about_gpu else None,
                first=first,
                code=code,
            )
        )
        COUNTS["driver faults armed"] += 1

    @stateful.rule(pick=script.picks)
    def instance_goes_behind_our_back(self, pick: int) -> None:
        if driver.remove_behind_back(self.rig.state, pick, spared=self.rig.kubelet.devices_in_use):
            self._note_other_change()

    @stateful.rule(pick=script.picks, is_orphan=st.booleans())
    def instance_comes_behind_our_back(self, pick: int, is_orphan: bool) -> None:  # noqa: FBT001
        before = simulated_rig.driver_geometry(self.rig.state)
        if driver.add_behind_back(self.rig.state, pick, is_orphan=is_orphan):
            after = simulated_rig.driver_geometry(self.rig.state)
            for index, (old, new) in enumerate(zip(before, after, strict=True)):
                self.unowned |= {(index, each) for each in new.instances - old.instances}
            self._note_other_change()

    @stateful.rule()
    def look_at_rest(self) -> None:
        if self.process is None or not self.process.inbox.is_resting:
            return
        self._clear_faults()
        self._begin_step()
        self.process.inbox.put_gpu_change()
        self._end_step(self.process.step())
        COUNTS["reads"] += 1
        assert not self.rig.evictions

    # -- what others do -----------------------------------------------------------------------

    @stateful.rule(acts=script.acts)
    def others_act(self, acts: list[tuple[script.StrikeKind, int]]) -> None:
        for kind, pick in acts:
            is_done = self.rig.script.acts[kind](pick)
            COUNTS["pods"] += bool(is_done) and kind is script.StrikeKind.POD_STARTS

    @stateful.rule(pick=script.picks)
    def other_client_starts(self, pick: int) -> None:
        self.rig.start_other_client(pick)

    @stateful.rule()
    def other_clients_end(self) -> None:
        self.rig.end_other_clients()

    @stateful.rule()
    def time_passes(self) -> None:
        self.rig.clock.wait(1.0)

    # -- what must hold -----------------------------------------------------------------------

    @stateful.invariant()
    def no_pod_loses_what_it_holds(self) -> None:
        COUNTS["acts"] += 1
        if hasattr(self, "rig"):
            assert not self.rig.violations

    @stateful.invariant()
    def at_rest_everything_is_as_its_owner_wants(self) -> None:
        if not self.is_at_rest:
            return
        rig, outcome = self.rig, self.step.outcome
        pending: tuple[str, ...] = ()
        if outcome is None:
            # Without a request, or at the end of the process, the next start or request rolls back
            # and finds out whether the devices are advertised.
            pending = ("snapshots", "advertisers")
        elif outcome.should_retry:
            # A drain that is tried again keeps its taint: pods have left the node already. The
            # next try rolls back where a process prevented that.
            pending = ("snapshots", "has_reconfiguring_taint")
        deployed = {key: value for key, value in rig.desired_labels.items() if value}
        view = fake_cluster.FakeNode(rig).latest(is_at_rest=True)
        remaining = unrestored.on_node(
            view, *pending, is_cordoned=rig.wants_cordon, deployed=deployed
        )
        assert remaining == []
        assert process.state_of(rig) is not run_status.State.PENDING

    @stateful.invariant()
    def at_rest_the_applied_label_is_true(self) -> None:
        name = hasattr(self, "rig") and self.rig.node_object.labels.get(well_known.APPLIED_LABEL)
        if not name or not self.is_at_rest or self.is_changed_by_others:
            return
        assert self.applied_layout is not None
        assert name == self.applied_layout[0]
        assert self._differences(self.applied_layout[1]) == []

    def teardown(self) -> None:
        try:
            if hasattr(self, "rig"):
                self._assert_converges_undisturbed()
        finally:
            self._abandon()
            simulated_nvml.load(None)
            structlog.reset_defaults()

    def _assert_converges_undisturbed(self) -> None:
        """End all disturbance: then every layout that the GPUs can have becomes active."""
        self._clear_faults()
        self.rig.remove_obstacles()
        name = next((n for n, lay in self.layouts.items() if layouts.is_feasible(lay)), "a")
        if not layouts.is_feasible(self.layouts[name]):
            self.layouts[name] = layouts.picked_layout(self.products, (0, 0, 0))
        self._write(layouts.document(self.layouts))
        # For the request from before its start the agent evicts no pod.
        self.take_the_label_away()
        self._label(name)
        for _ in range(3):
            self._serve([])
            self.check_all()
            if self.step.outcome and self.step.outcome.state is run_status.State.SUCCESS:
                return
        raise AssertionError(f"undisturbed, it still ends so: {self.step.outcome}")

    def check_all(self) -> None:
        self.no_pod_loses_what_it_holds()
        self.at_rest_everything_is_as_its_owner_wants()
        self.at_rest_the_applied_label_is_true()

    # -- one step of the agent, and what is true after it -------------------------------------

    def _serve(self, strikes: list[script.Strike]) -> None:
        if self.process is None:
            self.process = process.Process(self.rig, self.layout_source, heals=self.heals)
        self._begin_step()
        self._end_step(self.process.step(strikes))

    def _begin_step(self) -> None:
        rig = self.rig
        self.former_journal = rig.node_object.annotations.get(well_known.JOURNAL_ANNOTATION)
        rig.node_object.event_messages.clear()
        rig.node_object.status_messages.clear()
        rig.evictions.clear()
        self.strikes_before = self._strikes_by_gpu()

    def _end_step(self, step: process.LoopStep) -> None:
        self.step = step
        self._assert_evictions_are_justified()
        # The next start undoes what the API refuses to a stopped agent. And a journal of an
        # earlier process that could not be read may be that of a run under way: it stays as it is.
        text = self.rig.node_object.annotations.get(well_known.JOURNAL_ANNOTATION)
        is_left = text is not None and (step.is_over or text == self.former_journal)
        is_left = is_left and "node" in self.rig.script.failed_ports
        self.is_at_rest = not (step.is_killed or is_left)
        self._count(step)
        if step.is_over:
            self.process = None
        # Also a run that fails keeps what it has verified: the plugin or the API came after that.
        self.tried_layouts += [self.layouts[name] for name in step.names if name in self.layouts]
        for name in step.successes:
            self._note_applied(name)
        self._assert_outcome_is_true(step)
        if self.is_at_rest:
            self._assert_geometry_is_known()
            # The agent cannot restart the plugin before it finds what others changed.
            phantoms = self.rig.schedulable_devices - simulated_rig.devices(self.rig.state).keys()
            assert self.is_changed_by_others or not phantoms, step
        self.rig.kubelet.is_silent = False

    def _count(self, step: process.LoopStep) -> None:
        COUNTS["runs"] += len(step.names)
        COUNTS["kills"] += step.is_killed
        for kind in self.rig.script.struck:
            COUNTS[kind.value] += 1
        strikes = self._strikes_by_gpu() - self.strikes_before
        COUNTS["driver faults struck"] += strikes.total()

    def _assert_outcome_is_true(self, step: process.LoopStep) -> None:
        if step.outcome is not None:
            COUNTS[step.outcome.reason.value] += 1
            assert step.outcome.reason is not reasons.Reason.INTERNAL, step.outcome.message
            assert process.state_of(self.rig) is step.outcome.state
            if step.outcome.state is run_status.State.SUCCESS:
                self._assert_applied(step.successes[-1])
        elif step.is_killed and step.names:
            # A success may have been reported before the kill.
            name, messages = step.names[-1], self.rig.node_object.status_messages[-1:]
            if any(text.startswith(f"Layout {name} is ") for text in messages):
                assert self._differences(self._note_applied(name)) == []

    def _assert_evictions_are_justified(self) -> None:
        for eviction in self.rig.evictions:
            COUNTS["evictions"] += 1
            layout = self._layout_of(eviction.layout)
            assert eviction.is_justified(layout), (eviction, layout)

    def _note_applied(self, name: str) -> layouts.Layout:
        layout = self._layout_of(name)
        self.applied_layout, self.is_changed_by_others = (name, layout), False
        return layout

    def _layout_of(self, name: str | None) -> layouts.Layout:
        """Return the layout that the agent served by this name; without one, it may do nothing."""
        if self.layout_source.text == layouts.BROKEN:
            # The agent may have read no edit since it applied the layout.
            assert self.applied_layout is not None
            return self.applied_layout[1]
        return self.layouts.get(name or "", ())

    def _abandon(self) -> None:
        if self.process is not None:
            self.process.abandon()
        self.process = None

    def _strikes_by_gpu(self) -> collections.Counter[int | None]:
        """Count the strikes of the driver's faults by GPU; None: those that are about no GPU."""
        fired: collections.Counter[int | None] = collections.Counter()
        for armed in self.rig.state.faults():
            fired[armed.fault.gpu] += armed.strikes
        return fired

    def _clear_faults(self) -> None:
        self.rig.state.clear_faults()
        self.strikes_before = self._strikes_by_gpu()

    def _assert_geometry_is_known(self) -> None:
        """Find the GPUs as before, or as a layout that was requested has them.

        A message that the former instances are not restored excuses a GPU only if something in
        this step may have kept its driver from bringing them back.
        """
        messages = (
            self.step.outcome.message if self.step.outcome else "",
            *self.rig.node_object.event_messages,
        )
        is_reported = any(words in text for words in ROLLBACK_FAILED_TEXTS for text in messages)
        COUNTS["not undone, as reported"] += is_reported
        excused = self._hindered_gpus() if is_reported else frozenset()
        for index, geometry in enumerate(simulated_rig.driver_geometry(self.rig.state)):
            is_requested = any(
                not self._differences((*(None,) * index, layout[index]))
                for layout in self.tried_layouts
            )
            if not is_requested and not self._was_before(index, geometry):
                struck = self.rig.script.struck
                assert index in excused, (index, geometry, messages, self.step, struck)
                COUNTS["GPUs not undone"] += 1
        if self._remember(is_undone=not is_reported):
            self.tried_layouts.clear()
            self.unowned.clear()

    def _remember(self, *, is_undone: bool = True) -> bool:
        """Expect a change that fails to return to the GPUs as they are; return if to nothing else.

        A journal that is kept may lead to what was before it, at the next try or start.
        """
        now = simulated_rig.driver_geometry(self.rig.state)
        is_all = (
            is_undone and well_known.JOURNAL_ANNOTATION not in self.rig.node_object.annotations
        )
        for earlier, geometry in zip(self.before, now, strict=True):
            if is_all:
                earlier.clear()
            earlier.add(geometry)
        return is_all

    def _was_before(self, index: int, geometry: simulated_rig.GpuGeometry) -> bool:
        """Return whether a GPU has what it had, and beside that only what others made.

        Where others made something in the place of what it had, that cannot be back; and MIG stays
        on for what they made.
        """
        now = geometry.instances
        unowned = {instance for number, instance in self.unowned if number == index}
        for former in self.before[index]:
            was = former.instances
            free = {a for a in was if not any(a[0].overlaps(b[0]) for b in unowned & now)}
            if (geometry[:2] == former[:2] or unowned & now) and free <= now <= was | unowned:
                return True
        return False

    def _hindered_gpus(self) -> frozenset[int]:
        """Return the GPUs whose driver refused something in this step, or that processes use.

        That is all of them if a call failed that a rollback needs, be it to find the pods that use
        the devices. An older change is rolled back on all its GPUs or on none, so a process on one
        of them hinders the others, too.
        """
        everywhere = frozenset(range(len(self.products)))
        fired = self._strikes_by_gpu() - self.strikes_before
        is_blind = self.rig.kubelet.is_silent
        if fired[None] or is_blind or _PORTS_OF_ROLLBACK & self.rig.script.failed_ports:
            return everywhere
        users = {client.gpu_uuid for client in self.rig.state.read().clients}
        text = self.rig.node_object.annotations.get(well_known.JOURNAL_ANNOTATION)
        kept = (
            {gpu.uuid for gpu in journals.Journal.from_json(text).gpus.snapshots}
            if text
            else set()
        )
        if kept & users:
            users |= kept
        return everywhere & {
            index
            for index, board in enumerate(self.rig.state.boards)
            if fired[index] or board.uuid in users
        }

    def _assert_applied(self, name: str) -> None:
        assert self._differences(self._note_applied(name)) == []
        if self.rig.pods.plugins:
            missing = simulated_rig.devices(self.rig.state).keys() - self.rig.schedulable_devices
            assert not missing, self.step

    def _differences(self, layout: layouts.Layout) -> list[str]:
        """Compare with the GPUs by counting."""
        texts = []
        for index, choice in enumerate(layout):
            if choice is None:
                continue
            has = driver.device_counts(self.rig.state, index)
            if has != (None if choice.devices is None else collections.Counter(choice.devices)):
                texts.append(f"GPU {index}: {choice.devices} requested, {has} there")
            gpu = self.rig.state.read().gpus[index]
            if gpu.is_pending is not gpu.is_enabled:
                texts.append(f"GPU {index}: its mode waits for a reset")
            if any(not instance.compute_instances for instance in gpu.instances):
                texts.append(f"GPU {index}: an instance lies idle")
        return texts

    def _note_other_change(self) -> None:
        self.is_changed_by_others = True
        self._remember()
