package lockorder_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/fingerpost/fingerpost/tools/lockorder"
)

func check(t *testing.T, dir, doc string) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, doc))
	if err != nil {
		t.Fatal(err)
	}
	broken, err := lockorder.Check(dir, lockorder.ParseOrder(string(text)), "./...")
	if err != nil {
		t.Fatal(err)
	}
	return broken
}

// The locks of the program are as docs/concurrency-model.md says.
func TestLocksAreAsTheDocsSay(t *testing.T) {
	for _, b := range check(t, "../..", "docs/concurrency-model.md") {
		t.Error(b)
	}
}

// A program that breaks everything: its comments say where.
func TestEveryBreakIsFound(t *testing.T) {
	const dir = "testdata/broken"
	text, err := os.ReadFile(filepath.Join(dir, "broken.go"))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"broken.go:25: Bare.mu has no comment right above it",
		"broken.go:31: Counter.Mutex is not in the docs",
		"Gone.mu is in the docs and not in the code",
		"the docs let broken.all be taken under A.mu, which never happens",
	}
	for i, line := range strings.Split(string(text), "\n") {
		for _, m := range regexp.MustCompile(`// want (\S+) under (\S+)`).FindAllStringSubmatch(line, -1) {
			want = append(want, fmt.Sprintf("broken.go:%d: %s is taken under %s", i+1, m[1], m[2]))
		}
	}
	slices.Sort(want)
	var got []string
	for _, b := range check(t, dir, "order.md") {
		what, _, _ := strings.Cut(b, ", which no written order allows")
		what, _, _ = strings.Cut(what, " by ")
		got = append(got, what)
	}
	slices.Sort(got)
	if got = slices.Compact(got); !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
