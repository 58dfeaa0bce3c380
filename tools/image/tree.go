package main

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// A tree is what a layer holds, by absolute path.
type tree map[string]entry

type entry struct {
	mode    int64 // permissions, with tar's sticky bit
	dir     bool
	content []byte
}

// addDir adds a directory and those above it.
func (t tree) addDir(p string) {
	for p = path.Clean(p); p != "/"; p = path.Dir(p) {
		mode := int64(0o755)
		if path.Base(p) == "tmp" {
			mode = 0o1777
		}
		t[p] = entry{mode: mode, dir: true}
	}
}

// addFile adds a copy of a file: executable for everybody if it is for its
// owner, else readable, so that the umask of who built it does not matter.
func (t tree) addFile(src, dst string) error {
	content, err := os.ReadFile(src)
	if err != nil {
		return err
	}
	info, err := os.Stat(src)
	if err != nil {
		return err
	}
	mode := int64(0o644)
	if info.Mode()&0o100 != 0 {
		mode = 0o755
	}
	t.addDir(path.Dir(dst))
	t[path.Clean(dst)] = entry{mode: mode, content: content}
	return nil
}

// libraryDirs is where the loader of Debian and of its like looks.
var libraryDirs = []string{
	"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu",
	"/lib/aarch64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
	"/lib64", "/usr/lib64", "/lib", "/usr/lib",
}

// addLibraries adds the loader that a program names and the libraries that it
// and they need. A static program needs none.
func (t tree) addLibraries(program string) error {
	f, err := elf.Open(program)
	if err != nil {
		return fmt.Errorf("%s: %w", program, err)
	}
	defer func() { _ = f.Close() }()
	for _, p := range f.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		raw, err := io.ReadAll(p.Open())
		if err != nil {
			return err
		}
		loader := string(bytes.TrimRight(raw, "\x00"))
		if err := t.addFile(loader, loader); err != nil {
			return err
		}
	}
	needed, err := f.ImportedLibraries()
	if err != nil {
		return err
	}
	for _, name := range needed {
		lib, err := findLibrary(name, f.Machine)
		if err != nil {
			return fmt.Errorf("%s: %w", program, err)
		}
		if _, there := t[lib]; there {
			continue
		}
		if err := t.addFile(lib, lib); err != nil {
			return err
		}
		if err := t.addLibraries(lib); err != nil {
			return err
		}
	}
	return nil
}

func findLibrary(name string, machine elf.Machine) (string, error) {
	for _, dir := range libraryDirs {
		p := filepath.Join(dir, name)
		f, err := elf.Open(p)
		if err != nil {
			continue
		}
		same := f.Machine == machine
		_ = f.Close()
		if same {
			return p, nil
		}
	}
	return "", fmt.Errorf("no library %s in %s", name, strings.Join(libraryDirs, ":"))
}

// tar writes the tree sorted by path, so that a directory precedes what is in
// it, and with nothing of this machine in it: no times, no owners.
func (t tree) tar(w io.Writer) error {
	out := tar.NewWriter(w)
	for _, p := range slices.Sorted(maps.Keys(t)) {
		e := t[p]
		h := &tar.Header{Typeflag: tar.TypeReg, Name: strings.TrimPrefix(p, "/"), Mode: e.mode, Size: int64(len(e.content)), Format: tar.FormatUSTAR}
		if e.dir {
			h.Typeflag, h.Name = tar.TypeDir, h.Name+"/"
		}
		if err := out.WriteHeader(h); err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
		if _, err := out.Write(e.content); err != nil {
			return errors.Join(fmt.Errorf("%s: %w", p, err))
		}
	}
	return out.Close()
}
