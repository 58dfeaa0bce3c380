package report

import (
	"slices"
	"strings"
	"testing"
)

func TestWhatARevisionAddsAndDrops(t *testing.T) {
	for name, c := range map[string]struct {
		previous, held, now string
		partial             bool
		added, dropped      string
	}{
		"the same":                      {previous: "a b", held: "a b", now: "a b"},
		"one more":                      {previous: "a", held: "a b", now: "a b", added: "b"},
		"one less":                      {previous: "a b", held: "a", now: "a", dropped: "b"},
		"another":                       {previous: "a c", held: "b c", now: "b c", added: "b", dropped: "a"},
		"none any more":                 {previous: "a b", dropped: "a b"},
		"the first ever":                {now: "a b", held: "a b", added: "a b"},
		"dropped by itself":             {previous: "a", held: "a b", now: "a", dropped: "b"},
		"added, then dropped by itself": {previous: "a", held: "a b c", now: "a c", added: "c", dropped: "b"},
		"absent from half an answer":    {previous: "a b", held: "b c", now: "b c", partial: true, added: "c"},
	} {
		added, dropped := compare(strings.Fields(c.previous), strings.Fields(c.held), strings.Fields(c.now), !c.partial)
		if !slices.Equal(added, strings.Fields(c.added)) || !slices.Equal(dropped, strings.Fields(c.dropped)) {
			t.Errorf("%s: added %v, dropped %v, want %q and %q", name, added, dropped, c.added, c.dropped)
		}
	}
}
