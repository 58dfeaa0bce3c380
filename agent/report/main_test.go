package report_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/fingerpost/fingerpost/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(harness.Main{M: m}) }
