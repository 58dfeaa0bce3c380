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
	for path, write := range map[string]func(injection.Options) ([]byte, error){
		"injection/policy.yaml": injection.Policies,
	} {
		text, err := write(injection.Options{})
		if err != nil {
			return err
		}
		path = filepath.Join(components, filepath.FromSlash(path))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, text, 0o644); err != nil {
			return err
		}
	}
	return nil
}
