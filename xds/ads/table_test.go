package ads

import (
	"fmt"
	"testing"

	"github.com/fingerpost/fingerpost/xds"
)

// Invariant: names that nobody has and nobody holds take no slots for ever.
func TestSlotsOfDeadNamesAreGivenAgain(t *testing.T) {
	s := New(Options{})
	stays := &xds.Resource{ID: xds.ID{Name: "stays"}, Version: "1"}
	s.Publish(xds.Update{Set: []*xds.Resource{stays}})
	for i := range 10 * minSweep {
		r := &xds.Resource{ID: xds.ID{Type: xds.Endpoint, Name: fmt.Sprint(i)}, Version: "1"}
		s.Publish(xds.Update{Set: []*xds.Resource{r}})
		s.Publish(xds.Update{Remove: []xds.ID{r.ID}})
	}
	if n := len(s.table.slots); n > minSweep+1 {
		t.Fatalf("%d slots for one living name", n)
	}
	if n := len(s.table.names); n > minSweep+1 || s.table.names["stays"] != 0 {
		t.Fatalf("%d names", n)
	}
}
