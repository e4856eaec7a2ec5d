//go:build tools

// Package tools keeps what is built, and not imported, in go.mod.
package tools

import (
	_ "github.com/NVIDIA/mig-parted/cmd/nvidia-mig-manager"
	_ "github.com/NVIDIA/mig-parted/cmd/nvidia-mig-parted"
)
