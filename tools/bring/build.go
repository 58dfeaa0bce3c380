package main

import (
	"context"
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
		"-ldflags", ldflags(t), "-o", tmp, t.Package)
	cmd.Dir = filepath.Join("tools", t.Module)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
	var log strings.Builder
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Run(); err != nil {
		_ = os.Remove(tmp)
		return fmt.Errorf("%w\n%s", err, tail(log.String()))
	}
	return os.Rename(tmp, dst)
}

// ldflags are the linker's flags: no symbols and, for Kubernetes programs,
// the version, without which kube-apiserver reports v0.0.0 and switches
// features off.
func ldflags(t tools.Tool) string {
	flags := "-s -w"
	if t.Module != "kube" {
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
