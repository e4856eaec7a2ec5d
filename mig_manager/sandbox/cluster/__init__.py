"""The parts of a sandbox node and its tiny control plane; ``sandbox.node`` runs them in turn.

On the node: ``kubelet`` with its device manager ``devices`` and ``podresources_server``; what its
pods run is in ``programs`` and ``deviceplugin``, which see the hardware through ``nodegpus``.
In the control plane: ``daemonsets`` and ``scheduler``. All read and write the API through
``view``; ``objects`` reads what they find, ``manifests`` has what they write, ``nodeoptions`` how
they behave.
"""
