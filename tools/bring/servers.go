package main

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/fingerpost/fingerpost/tools"
)

// fetchers bring the tools that are no Go programs. Each leaves nothing at dst
// unless all of it is there.
var fetchers = map[string]func(context.Context, tools.Tool, string) error{
	"envoy":         fetchEnvoy,
	tools.GrpcJS:    fetchNode,
	tools.GrpcJSXDS: fetchNode,
	tools.GrpcJava:  fetchGrpcJava,
	tools.Tonic:     buildTonic,
	tools.Grpcio: func(context.Context, tools.Tool, string) error {
		return errors.New("install Debian's package python3-grpcio")
	},
}

// fetchNode installs what package-lock.json pins, with its checksums.
func fetchNode(ctx context.Context, t tools.Tool, dst string) error {
	return whole(dst, func(dir string) error {
		for _, name := range []string{"package.json", "package-lock.json"} {
			text, err := os.ReadFile(filepath.Join("tools", t.Module, name))
			if err == nil {
				err = os.WriteFile(filepath.Join(dir, name), text, 0o644)
			}
			if err != nil {
				return err
			}
		}
		return command(ctx, dir, nil, "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline")
	})
}

// fetchGrpcJava gathers the jars that pom.xml names, and what those need, and
// compares their checksums: Maven has no lock file.
func fetchGrpcJava(ctx context.Context, t tools.Tool, dst string) error {
	module := filepath.Join("tools", t.Module)
	return whole(dst, func(dir string) error {
		err := command(ctx, ".", nil, "mvn", "-q", "-B", "-f", filepath.Join(module, "pom.xml"),
			"dependency:copy-dependencies", "-DoutputDirectory="+dir)
		if err != nil {
			return err
		}
		return checkJars(filepath.Join(module, "jars.sha256"), dir)
	})
}

// checkJars compares the files of a directory with a list as sha256sum writes
// it; neither may have one that the other lacks.
func checkJars(list, dir string) error {
	f, err := os.Open(list)
	if err != nil {
		return err
	}
	defer f.Close()
	listed := 0
	for lines := bufio.NewScanner(f); lines.Scan(); listed++ {
		want, name, ok := strings.Cut(lines.Text(), "  ")
		if !ok {
			return fmt.Errorf("%s: line %d is no checksum and name", list, listed+1)
		}
		jar, err := os.ReadFile(filepath.Join(dir, filepath.Base(name)))
		if err != nil {
			return err
		}
		if sum := sha256.Sum256(jar); hex.EncodeToString(sum[:]) != want {
			return fmt.Errorf("%s: sha256 is %x, want %s", name, sum, want)
		}
	}
	jars, err := os.ReadDir(dir)
	if err == nil && len(jars) != listed {
		err = fmt.Errorf("%d jars came, want the %d of %s", len(jars), listed, list)
	}
	return err
}

// buildTonic compiles the server with what Cargo.lock pins. Who changes main.rs
// changes the number in its version.
func buildTonic(ctx context.Context, t tools.Tool, dst string) error {
	if err := os.MkdirAll(filepath.Dir(dst), 0o755); err != nil {
		return err
	}
	target, err := os.MkdirTemp(filepath.Dir(dst), "target-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(target) }()
	err = command(ctx, filepath.Join("tools", t.Module), []string{"CARGO_TARGET_DIR=" + target}, "cargo", "build", "--quiet", "--release", "--locked")
	if err != nil {
		return err
	}
	return os.Rename(filepath.Join(target, "release", "tonic-server"), dst)
}

// whole lets fill fill a new directory, and gives it its name if that works.
func whole(dst string, fill func(dir string) error) error {
	if err := os.MkdirAll(filepath.Dir(dst), 0o755); err != nil {
		return err
	}
	dir, err := os.MkdirTemp(filepath.Dir(dst), "new-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := fill(dir); err != nil {
		return err
	}
	return os.Rename(dir, dst)
}

// command runs a program of another language's tools.
func command(ctx context.Context, dir string, env []string, name string, args ...string) error {
	if _, err := exec.LookPath(name); err != nil {
		return fmt.Errorf("%s is needed: install it", name)
	}
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", name, err, tail(string(out)))
	}
	return nil
}
