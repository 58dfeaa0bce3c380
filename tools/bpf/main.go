// Command bpf compiles the BPF program of a Go package and writes the Go code
// that loads it: bpf2go with the one clang that gives the bytes that are
// committed, and this machine's UAPI headers.
//
//	go run . DIR IDENT FILE.c [flags of bpf2go]
//
// DIR is the package's directory, IDENT begins the names of what is generated,
// and FILE.c is in DIR. It is run by go generate, which says the package's name.
package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// major is the version of clang; another one makes other code, which may not
// pass the verifiers that this one's was tried with.
const major = "14"

func main() {
	if len(os.Args) < 4 {
		fmt.Fprintln(os.Stderr, "usage: bpf DIR IDENT FILE.c [flags of bpf2go]")
		os.Exit(2)
	}
	if err := generate(os.Args[1], os.Args[2], os.Args[3], os.Args[4:]); err != nil {
		fmt.Fprintln(os.Stderr, "bpf:", err)
		os.Exit(1)
	}
}

func generate(dir, ident, file string, flags []string) error {
	clang, err := tool("clang", "--version")
	if err != nil {
		return err
	}
	strip, err := tool("llvm-strip", "--version")
	if err != nil {
		return err
	}
	args := []string{"tool", "bpf2go", "-cc", clang, "-strip", strip, "-target", "bpfel", "-output-dir", dir}
	args = append(append(args, flags...), ident, filepath.Join(dir, file), "--", "-O2", "-Wall", "-Werror")
	// Debian keeps <asm/types.h> below the machine's triplet.
	if includes, _ := filepath.Glob("/usr/include/*-linux-gnu/asm"); len(includes) > 0 {
		args = append(args, "-idirafter", filepath.Dir(includes[0]))
	}
	cmd := exec.Command("go", args...)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	return cmd.Run()
}

// tool finds a program of the LLVM that counts, with its version in its name or
// not.
func tool(name, flag string) (string, error) {
	var seen []string
	for _, n := range []string{name + "-" + major, name} {
		path, err := exec.LookPath(n)
		if err != nil {
			continue
		}
		out, err := exec.Command(path, flag).Output()
		if err != nil {
			return "", fmt.Errorf("%s: %w", path, err)
		}
		if strings.Contains(string(out), "version "+major+".") {
			return path, nil
		}
		seen = append(seen, path)
	}
	if seen != nil {
		return "", fmt.Errorf("%s is not of version %s; install Debian's clang-%s and llvm-%s", strings.Join(seen, ", "), major, major, major)
	}
	return "", errors.New(name + " is not there; install Debian's clang, llvm and libbpf-dev")
}
