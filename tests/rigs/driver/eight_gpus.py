"""A node of eight GPUs that loses one, and layouts that name it or others."""

SPEC = "8xA100-SXM4-40GB"
LOST = 3
LAYOUTS = """
version: v1
mig-configs:
  halves:
  - {devices: all, mig-enabled: true, mig-devices: {3g.20gb: 2}}
  sevenths:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}
  too-much:
  - {devices: all, mig-enabled: true, mig-devices: {4g.20gb: 2}}
  names-it:
  - {devices: [3], mig-enabled: true, mig-devices: {1g.5gb: 7}}
  names-others:
  - {devices: [0, 7], mig-enabled: true, mig-devices: {1g.5gb: 7}}
"""
