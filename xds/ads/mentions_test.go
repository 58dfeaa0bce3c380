package ads

import "testing"

func TestTextNamesAResourceAndNotALongerOne(t *testing.T) {
	for _, row := range []struct {
		text, name string
		want       bool
	}{
		{"Error adding/updating cluster(s) prod/pkg.S: no endpoints", "prod/pkg.S", true},
		{"Error adding/updating cluster(s) prod/pkg.S2: x, prod/pkg.S: y", "prod/pkg.S", true},
		{"Error adding/updating cluster(s) prod/pkg.S2: x", "prod/pkg.S", false},
		{"cluster 'a' is bad", "a", true},
		{"bad name a.", "a", true},
		{"bad name a.b", "a", false},
		{"a", "a", true},
		{"", "a", false},
		{"x", "", false},
		{"ab a", "a", true},
		{"oprod/a", "prod/a", false},
	} {
		if got := mentions(row.text, row.name); got != row.want {
			t.Errorf("%q in %q: %v", row.name, row.text, got)
		}
	}
}
