//go:build tools

// Package tools keeps what is built, and not imported, in go.mod.
package tools

import _ "github.com/NVIDIA/gpu-operator/cmd/gpu-operator"
