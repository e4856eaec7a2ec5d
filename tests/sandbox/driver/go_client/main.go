// Prints every MIG device of a node through NVIDIA's own Go binding, which is compiled against
// NVIDIA's own nvml.h: a client that shares nothing with the project's Python.
package main

import (
	"fmt"
	"os"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

func must(what string, code nvml.Return) {
	if code != nvml.SUCCESS {
		fmt.Fprintf(os.Stderr, "%s: %s\n", what, nvml.ErrorString(code))
		os.Exit(1)
	}
}

func main() {
	library := nvml.New(nvml.WithLibraryPath(os.Args[1]))
	must("init", library.Init())
	count, code := library.DeviceGetCount()
	must("count", code)
	for index := 0; index < count; index++ {
		gpu, code := library.DeviceGetHandleByIndex(index)
		must("handle", code)
		uuid, code := gpu.GetUUID()
		must("uuid", code)
		pci, code := gpu.GetPciInfo()
		must("pci", code)
		memory, code := gpu.GetMemoryInfo()
		must("memory", code)
		fmt.Printf("gpu %d %s %x:%x:%x %d\n", index, uuid, pci.Domain, pci.Bus, pci.Device, memory.Total)
		current, _, code := gpu.GetMigMode()
		if code != nvml.SUCCESS || current != nvml.DEVICE_MIG_ENABLE {
			continue
		}
		for profile := 0; profile < nvml.GPU_INSTANCE_PROFILE_COUNT; profile++ {
			info, code := gpu.GetGpuInstanceProfileInfo(profile)
			if code != nvml.SUCCESS {
				continue
			}
			instances, code := gpu.GetGpuInstances(&info)
			must("instances", code)
			for _, instance := range instances {
				own, code := instance.GetInfo()
				must("instance", code)
				fmt.Printf("instance %d %d@%d+%d %d MiB\n",
					own.Id, own.ProfileId, own.Placement.Start, own.Placement.Size, info.MemorySizeMB)
			}
		}
		most, code := gpu.GetMaxMigDeviceCount()
		must("most", code)
		for one := 0; one < most; one++ {
			device, code := gpu.GetMigDeviceHandleByIndex(one)
			if code == nvml.ERROR_NOT_FOUND {
				continue
			}
			must("device", code)
			uuid, code := device.GetUUID()
			must("device uuid", code)
			fmt.Printf("device %s\n", uuid)
		}
	}
	must("shutdown", library.Shutdown())
}
