"""Labels of NVIDIA's GPU feature discovery, which are read and never written."""

import re

PRESENT = "nvidia.com/gpu.present"
PRODUCT = "nvidia.com/gpu.product"
COUNT = "nvidia.com/gpu.count"
MIG_CAPABLE = "nvidia.com/mig.capable"
STRATEGY = "nvidia.com/mig.strategy"
MIG_DEVICES = re.compile(r"nvidia\.com/mig-\S+\.count")  # of one profile, with strategy mixed
MPS_CAPABLE = "nvidia.com/mps.capable"
"""``true``: the device plugin shares the GPUs by MPS, and none has MIG enabled."""
