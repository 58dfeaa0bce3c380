package nodecache_test

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(crashDir); dir != "" {
		crashWriter(dir)
	}
	goleak.VerifyTestMain(m)
}
