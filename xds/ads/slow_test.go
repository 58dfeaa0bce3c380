package ads

import (
	"strings"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/xds"
)

func TestSlownessSaysWhatTheClientDoesNotDo(t *testing.T) {
	st := newStream(t.Context(), New(Options{Grace: time.Minute}), true, aggregated)
	now := time.Now()
	if got := st.slowness(now); got != "" {
		t.Fatal(got)
	}
	st.types[xds.Endpoint].inFlight, st.types[xds.Endpoint].sentAt = true, now.Add(-2*time.Minute)
	if got := st.slowness(now); got != "has not acknowledged eds for 2m0s" {
		t.Fatal(got)
	}
	st.sending(now.Add(-3 * time.Minute))
	if got := st.slowness(now); !strings.HasPrefix(got, "does not read: a response waits for 3m0s") {
		t.Fatal(got)
	}
	st.sending(now)
	st.types[xds.Endpoint].inFlight = false
	if got := st.slowness(now); got != "" {
		t.Fatal(got)
	}
}
