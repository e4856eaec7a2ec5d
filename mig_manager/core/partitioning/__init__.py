"""Decide which nodes get other GPU instances for pending pods.

``decider`` makes a decision about the pods of a ``batch`` and the ``nodes``: ``decision`` has its
parts, and ``search`` tries whether devices fit the GPUs of a node. ``demand`` parses pods. Apart
from that, ``breaker`` stops requests that agents fail.

The terms, as ``decider`` uses them in order:

- A situation has the nodes, the limits, the time and the past of one decision.
- A batch has the pending pods of one decision. The rank of a pod is its place in their order, by
  priority and age. Pods of a group have equal needs.
- The position of a node is its place in the ``NodeIndex``. A node is opted in if its label lets
  the partitioner change it.
- A node has room for a pod if idle devices and the other resources suffice. Room is dated: it is
  kept for its pod for ``ROOM_TIMEOUT_S``.
- An assumed pod has room, and the decision counts it as if it were bound already.
- A pod is unplaced on a node if the scheduler has not bound it there although it had room for
  that time. For as long again the pod gets no room there. Such rooms count as ignored, and after
  several of them the pod gets new room less and less often.
- A nominated node is one where the scheduler preempts pods for a pod; the decision leaves both.
- An offer is a change of one node, with the pods that it would make room for. The best one
  becomes a requested change.
- A GPU on hold gets no new instances for pods of a later rank than the pod it waits for.
"""
