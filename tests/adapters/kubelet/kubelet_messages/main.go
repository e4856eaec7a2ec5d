// Prints messages of kubelet's PodResources service as kubelet writes them: with the types that
// Kubernetes generates from its own api.proto. The output is messages.json beside this file.
package main

import (
	"encoding/hex"
	"encoding/json"
	"os"

	"google.golang.org/protobuf/proto"
	v1 "k8s.io/kubelet/pkg/apis/podresources/v1"
)

func devices(resource string, ids ...string) *v1.ContainerDevices {
	return &v1.ContainerDevices{
		ResourceName: resource,
		DeviceIds:    ids,
		Topology:     &v1.TopologyInfo{Nodes: []*v1.NUMANode{{ID: 1}}},
	}
}

func main() {
	messages := map[string]proto.Message{
		"list": &v1.ListPodResourcesResponse{PodResources: []*v1.PodResources{
			{
				Name: "train-0", Namespace: "team-a",
				Containers: []*v1.ContainerResources{
					{
						Name:    "main",
						Devices: []*v1.ContainerDevices{devices("nvidia.com/mig-1g.5gb", "MIG-1", "MIG-2")},
						CpuIds:  []int64{2, 3},
						Memory: []*v1.ContainerMemory{{
							MemoryType: "memory", Size: 1 << 30,
							Topology: &v1.TopologyInfo{Nodes: []*v1.NUMANode{{ID: 0}}},
						}},
					},
					{Name: "sidecar"},
				},
			},
			{
				Name: "claims-0", Namespace: "team-b",
				Containers: []*v1.ContainerResources{{
					Name: "main",
					DynamicResources: []*v1.DynamicResource{{
						ClaimName: "one", ClaimNamespace: "team-b",
						ClaimResources: []*v1.ClaimResource{{
							CdiDevices: []*v1.CDIDevice{{Name: "k8s.gpu.nvidia.com/device=gpu-0"}},
							DriverName: "gpu.nvidia.com", PoolName: "node", DeviceName: "gpu-0",
						}},
					}},
				}},
			},
			{Name: "plain", Namespace: "default", Containers: []*v1.ContainerResources{{Name: "main"}}},
		}},
		"allocatable": &v1.AllocatableResourcesResponse{
			Devices: []*v1.ContainerDevices{
				devices("nvidia.com/mig-1g.5gb", "MIG-1"),
				devices("nvidia.com/mig-1g.5gb", "MIG-2"),
				devices("nvidia.com/gpu", "GPU-1"),
			},
			CpuIds: []int64{0, 1, 2, 3},
			Memory: []*v1.ContainerMemory{{MemoryType: "hugepages-2Mi", Size: 0}},
		},
	}
	written := map[string]string{}
	for name, one := range messages {
		raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(one)
		if err != nil {
			panic(err)
		}
		written[name] = hex.EncodeToString(raw)
	}
	out := json.NewEncoder(os.Stdout)
	out.SetIndent("", "  ")
	if err := out.Encode(written); err != nil {
		panic(err)
	}
}
