"""A simulated node of a cluster, and a tiny control plane.

``sandbox_node`` runs kubelet with its ``device_manager``, NVIDIA's ``device_plugin`` and other
programs in pods, and the ``control_plane`` (scheduler, DaemonSet controller). All read and write
the API through ``cluster_view``.
"""
