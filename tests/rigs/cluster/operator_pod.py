"""The pod of the MIG manager as NVIDIA's GPU operator deploys it."""

NAMESPACE = "gpu-operator"
NAME = "nvidia-mig-manager-x7k2p"
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": NAME, "namespace": NAMESPACE},
    "spec": {"containers": [{"name": "nvidia-mig-manager", "image": "mig-manager"}]},
}
ENVIRON = {
    "POD_NAME": NAME,
    "POD_NAMESPACE": NAMESPACE,
    "CONFIG_FILE": "/mig-parted-config/config.yaml",
    "GPU_CLIENTS_FILE": "/gpu-clients/clients.yaml",
    "DEFAULT_GPU_CLIENTS_NAMESPACE": NAMESPACE,
    "WITH_REBOOT": "false",
    "CDI_ENABLED": "true",
    "NVIDIA_CDI_HOOK_PATH": "/usr/local/nvidia/toolkit/nvidia-cdi-hook",
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_MIG_CONFIG_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "utility",
    "NVIDIA_DISABLE_REQUIRE": "true",
}
"""What its DaemonSet sets beside the node's name, with a config of the user's own and with CDI."""
