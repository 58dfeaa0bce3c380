// Command generate writes what daemonset/components has of package injection.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/fingerpost/fingerpost/daemonset/injection"
)

func main() {
	if err := run(filepath.Join("..", "components")); err != nil {
		fmt.Fprintln(os.Stderr, "generate:", err)
		os.Exit(1)
	}
}

func run(components string) error {
	policies, err := injection.Policies(injection.Options{})
	if err != nil {
		return err
	}
	if err := write(filepath.Join(components, "injection"), map[string][]byte{"policy.yaml": policies}); err != nil {
		return err
	}
	patches, err := injection.Patches(injection.Options{})
	if err != nil {
		return err
	}
	return write(filepath.Join(components, "injection-patches"), patches)
}

func write(dir string, files map[string][]byte) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil {
			return err
		}
	}
	return nil
}
