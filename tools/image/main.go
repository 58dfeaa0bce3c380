// Image writes a container image as one archive, without a Docker daemon and
// without a registry.
//
//	image -o FILE -name NAME:TAG [-arch amd64] [-entrypoint P] [-arg A]... [-label K=V]... [-libs] FILE=/PATH...
//
// The archive is an OCI image layout and, by the manifest.json beside it, also
// what docker load reads: skopeo, containerd's ctr images import, kind load
// image-archive and docker load take it as it is. Its only layer holds the
// named files and the directories above them, owned by root, at the time 0.
// The same files give the same bytes, whoever builds them, when and where; the
// digest, which it prints, depends on them and on the version of Go alone.
//
// With -libs the shared libraries that a file needs are added from this
// machine, at the same paths, so that a program linked to glibc runs.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path"
	"strings"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

// list is a flag that may be given more than once.
type list []string

func (l *list) String() string     { return strings.Join(*l, " ") }
func (l *list) Set(s string) error { *l = append(*l, s); return nil }

func run(args []string) error {
	var (
		flags        = flag.NewFlagSet("image", flag.ExitOnError)
		out          = flags.String("o", "", "the archive to write")
		name         = flags.String("name", "", "name and tag of the image")
		arch         = flags.String("arch", "amd64", "architecture of the programs")
		libs         = flags.Bool("libs", false, "add the shared libraries the files need")
		entry, cmd   list
		dirs, labels list
	)
	flags.Var(&entry, "entrypoint", "one word of the entrypoint")
	flags.Var(&cmd, "arg", "one default argument")
	flags.Var(&dirs, "dir", "an empty directory to add, writable for everybody if it ends in /tmp")
	flags.Var(&labels, "label", "KEY=VALUE")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *out == "" || *name == "" || flags.NArg() == 0 {
		return errors.New("needs -o, -name and at least one FILE=/PATH")
	}
	spec := image{name: *name, arch: *arch, entrypoint: entry, args: cmd, labels: map[string]string{}}
	for _, l := range labels {
		k, v, ok := strings.Cut(l, "=")
		if !ok {
			return fmt.Errorf("-label %q: want KEY=VALUE", l)
		}
		spec.labels[k] = v
	}
	root := tree{}
	for _, d := range dirs {
		root.addDir(d)
	}
	for _, a := range flags.Args() {
		src, dst, ok := strings.Cut(a, "=")
		if !ok || !path.IsAbs(dst) {
			return fmt.Errorf("%q: want FILE=/PATH", a)
		}
		if err := root.addFile(src, dst); err != nil {
			return err
		}
		if *libs {
			if err := root.addLibraries(src); err != nil {
				return err
			}
		}
	}
	digest, size, err := spec.write(root, *out)
	if err != nil {
		return err
	}
	fmt.Printf("%s %s %d bytes compressed\n", *name, digest, size)
	return nil
}
