// Package e2e_test tests the built program as its users run it: with files of
// pods or a real API server in front, and real Envoys and gRPC clients behind.
package e2e_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/fingerpost/fingerpost/test/harness"
)

// program is the path of the built fingerpost.
var program string

// built builds the program before the tests and removes it after them.
type built struct{ harness.Main }

func (b built) Run() int {
	dir, err := os.MkdirTemp("", "fingerpost-e2e-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	program = filepath.Join(dir, "fingerpost")
	build := exec.Command("go", "build", "-o", program, "../../cmd/fingerpost")
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "build of cmd/fingerpost:", err)
		return 1
	}
	return b.Main.Run()
}

func TestMain(m *testing.M) {
	if os.Getenv(goProgramEnv) != "" {
		goProgram()
		return
	}
	if text := os.Getenv(errandEnv); text != "" {
		application(text)
		return
	}
	goleak.VerifyTestMain(built{harness.Main{M: m}})
}
