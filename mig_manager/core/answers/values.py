"""Values of keys in several answers; the quoted name has the possible ones."""

from typing import Annotated

MigMode = Annotated[str, "core.model.MigMode"]
Phase = Annotated[str, "core.model.Phase"]
Reason = Annotated[str, "reasons.Reason"]
State = Annotated[str, "core.model.State"]
Strategy = Annotated[str, "core.node.devices.strategies.Strategy"]
