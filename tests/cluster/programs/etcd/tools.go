//go:build tools

// Package tools keeps what is built, and not imported, in go.mod.
package tools

import _ "go.etcd.io/etcd/server/v3"
