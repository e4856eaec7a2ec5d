"""Values of keys in several answers; the quoted name has the possible ones."""

from typing import Annotated

MigMode = Annotated[str, "core.model.MigMode"]
Phase = Annotated[str, "core.records.run_status.Phase"]
Reason = Annotated[str, "reasons.Reason"]
State = Annotated[str, "core.records.run_status.State"]
Strategy = Annotated[str, "core.node.devices.strategies.Strategy"]
