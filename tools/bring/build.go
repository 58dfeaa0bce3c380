package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/fingerpost/fingerpost/tools"
)

// build compiles a tool from its module to a temporary name and renames it to
// dst, so that dst is never a half-written program.
func build(ctx context.Context, t tools.Tool, dst string) error {
	if err := os.MkdirAll(filepath.Dir(dst), 0o755); err != nil {
		return err
	}
	tmp := dst + ".tmp"
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false",
		"-tags", tags[t.Name], "-ldflags", ldflags(t), "-o", tmp, t.Package)
	cmd.Dir = filepath.Join("tools", t.Module)
	cgo := "0"
	if t.Name == "runc" {
		cgo = "1" // for libseccomp, and to enter namespaces before Go's threads start
		if err := exec.CommandContext(ctx, "pkg-config", "--exists", "libseccomp").Run(); err != nil {
			return errors.New("install Debian's packages libseccomp-dev, pkg-config and gcc")
		}
	}
	cmd.Env = append(os.Environ(), "CGO_ENABLED="+cgo, "GOWORK=off")
	var log strings.Builder
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Run(); err != nil {
		_ = os.Remove(tmp)
		return fmt.Errorf("%w\n%s", err, tail(log.String()))
	}
	return os.Rename(tmp, dst)
}

// tags are the build tags by tool: containerd without the storage and the shim
// without the protocol that a node of kind has no use for, runc with what its
// own release is built with.
var tags = map[string]string{
	"containerd":              "no_aufs no_zfs no_btrfs no_devmapper",
	"ctr":                     "no_aufs no_zfs no_btrfs no_devmapper",
	"containerd-shim-runc-v2": "no_grpc",
	"runc":                    "seccomp urfave_cli_no_docs",
}

// ldflags are the linker's flags: no symbols and the version where a program
// has none of its own: without it kube-apiserver reports v0.0.0 and switches
// features off, and kind asks containerd for it.
func ldflags(t tools.Tool) string {
	flags := "-s -w"
	switch t.Module {
	case "containerd":
		return flags + " -X github.com/containerd/containerd/v2/version.Version=" + t.Version
	case "crictl":
		return flags + " -X sigs.k8s.io/cri-tools/pkg/version.Version=" + t.Version
	case "kube":
	default:
		return flags
	}
	const at = "k8s.io/component-base/version."
	part := strings.Split(strings.TrimPrefix(t.Version, "v"), ".")
	for _, kv := range [][2]string{
		{"gitVersion", t.Version},
		{"gitMajor", part[0]},
		{"gitMinor", part[1]},
		{"gitTreeState", "clean"},
		{"gitCommit", strings.Repeat("0", 40)},
		{"buildDate", "2026-01-01T00:00:00Z"},
	} {
		flags += " -X " + at + kv[0] + "=" + kv[1]
	}
	return flags
}

// tail is the last part of a log, long enough to see what went wrong.
func tail(log string) string {
	const lines = 30
	all := strings.Split(strings.TrimSpace(log), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
