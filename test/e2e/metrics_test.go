package e2e_test

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

func TestEveryMetricIsInTheDocs(t *testing.T) {
	docs, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t)
	w.serve("web-1-a", []string{"shop.Web"})
	a := newSite(t).start(t, "--source", w.write().source()).ready()
	_, scrape, err := a.get("/metrics")
	if err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile(`(?m)^# TYPE (fingerpost_\w+)`).FindAllStringSubmatch(scrape, -1)
	if len(names) < 10 {
		t.Fatalf("scraped %d metrics of the agent's own", len(names))
	}
	for _, m := range names {
		if !strings.Contains(string(docs), "`"+m[1]) {
			t.Errorf("%s is not in docs/operations.md", m[1])
		}
	}
}
