// What NVIDIA's container runtime does in its legacy mode, in short. A container that asks for GPUs
// by NVIDIA_VISIBLE_DEVICES is given the driver's library, nvidia-smi and its files in /proc; one that
// asks for MIG devices that do not exist does not start, nor does one that wants to change MIG
// instances without CAP_SYS_ADMIN. While it runs, it uses its devices. Everything else is runc's work.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

type object = map[string]any

const driver = "/run/nvidia/simulated"
const libraries = "/usr/lib/x86_64-linux-gnu"

func main() {
	var err error
	switch name, of := argument("hook"), argument("--bundle"); {
	case name != "":
		err = hook(name)
	case of != "" && slices.Contains(os.Args, "create"):
		err = inject(filepath.Join(of, "config.json"))
	}
	if err == nil && argument("hook") == "" {
		var runc string
		if runc, err = exec.LookPath("runc"); err == nil {
			err = syscall.Exec(runc, os.Args, os.Environ())
		}
	}
	if err != nil {
		os.Stderr.WriteString("nvidia-container-runtime: " + err.Error() + "\n")
		os.Exit(1)
	}
}

// argument returns what follows a word of the command line.
func argument(word string) string {
	if at := slices.Index(os.Args, word); at > 0 && at+1 < len(os.Args) {
		return os.Args[at+1]
	}
	return ""
}

// inject gives a container what it asks for.
func inject(path string) error {
	spec, err := read(path)
	if err != nil {
		return err
	}
	if devices(spec) == nil {
		return nil
	}
	if variable(spec, "NVIDIA_MIG_CONFIG_DEVICES") != "" && !hasSysAdmin(spec) {
		return errors.New("NVIDIA_MIG_CONFIG_DEVICES takes CAP_SYS_ADMIN")
	}
	mounts, _ := spec["mounts"].([]any)
	for name, folder := range map[string]string{
		"libnvidia-ml.so.1": libraries, "nvml.sock": libraries,
		"nvidia-smi": "/usr/bin", "nvidia-smi.sock": libraries,
	} {
		mounts = append(mounts, object{
			"destination": filepath.Join(folder, name), "source": filepath.Join(driver, name),
			"type": "bind", "options": []string{"rbind", "rprivate", "ro"},
		})
	}
	spec["mounts"] = mounts
	self, err := os.Executable()
	if err != nil {
		return err
	}
	hooks, _ := spec["hooks"].(object)
	if hooks == nil {
		hooks = object{}
	}
	for _, name := range []string{"createRuntime", "createContainer", "poststop"} {
		others, _ := hooks[name].([]any)
		hooks[name] = append(others, object{"path": self, "args": []string{self, "hook", name}})
	}
	spec["hooks"] = hooks
	content, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	return os.WriteFile(path, content, 0o600)
}

// hook runs with a container's state on its standard input.
func hook(name string) error {
	var state struct {
		Id, Bundle string
		Pid        int
	}
	if err := json.NewDecoder(os.Stdin).Decode(&state); err != nil {
		return err
	}
	spec, err := read(filepath.Join(state.Bundle, "config.json"))
	if err != nil {
		return err
	}
	switch name {
	case "createContainer":
		// runc itself mounts nothing inside /proc, where the driver has its files.
		root := spec["root"].(object)["path"].(string)
		if !filepath.IsAbs(root) {
			root = filepath.Join(state.Bundle, root)
		}
		bound := map[string]string{
			driver + "/proc":    root + "/proc/driver",
			driver + "/boot_id": root + "/proc/sys/kernel/random/boot_id",
		}
		for source, target := range bound {
			if err := syscall.Mount(source, target, "", syscall.MS_BIND|syscall.MS_REC, ""); err != nil {
				return err
			}
		}
		return nil
	case "createRuntime":
		return report(object{"status": "starting", "id": state.Id, "pid": state.Pid, "devices": own(spec)})
	default:
		return report(object{"status": "stopped", "id": state.Id})
	}
}

// report says what happens to a container; the driver's answer is what is wrong with it, if anything.
func report(message object) error {
	connection, err := net.Dial("unix", driver+"/containers.sock")
	if err != nil {
		return err
	}
	defer connection.Close()
	if err := json.NewEncoder(connection).Encode(message); err != nil {
		return err
	}
	answer, err := bufio.NewReader(connection).ReadString('\n')
	if err != nil {
		return err
	}
	if answer = strings.TrimSpace(answer); answer != "" {
		return errors.New(answer)
	}
	return nil
}

func read(path string) (object, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var spec object
	return spec, json.Unmarshal(content, &spec)
}

// devices returns what a container asks for, nil for nothing.
func devices(spec object) []string {
	switch asked := variable(spec, "NVIDIA_VISIBLE_DEVICES"); asked {
	case "", "void", "none":
		return nil
	default:
		return strings.Split(asked, ",")
	}
}

// own returns the devices that a container computes on: one that sees all GPUs only looks at them.
func own(spec object) []string {
	named := []string{}
	for _, device := range devices(spec) {
		if strings.HasPrefix(device, "GPU-") || strings.HasPrefix(device, "MIG-") {
			named = append(named, device)
		}
	}
	return named
}

func variable(spec object, name string) string {
	value := ""
	variables, _ := spec["process"].(object)["env"].([]any)
	for _, each := range variables {
		if found, is := strings.CutPrefix(each.(string), name+"="); is {
			value = found
		}
	}
	return value
}

func hasSysAdmin(spec object) bool {
	capabilities, _ := spec["process"].(object)["capabilities"].(object)
	bounding, _ := capabilities["bounding"].([]any)
	return slices.Contains(bounding, any("CAP_SYS_ADMIN"))
}
