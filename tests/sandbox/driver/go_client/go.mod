module mig-manager.io/tests/nvml-client

go 1.22

require github.com/NVIDIA/go-nvml v0.12.4-1
