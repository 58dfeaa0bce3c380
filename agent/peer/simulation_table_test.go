//go:build sim

package peer

import (
	"cmp"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
)

// TestSimulation prints the table of docs/scale.md: make sim.
func TestSimulation(t *testing.T) {
	var rows []simRow
	for nodes := range strings.SplitSeq(cmp.Or(os.Getenv("NODES"), "100,1000,5000"), ",") {
		n, err := strconv.Atoi(nodes)
		if err != nil {
			t.Fatal(err)
		}
		rows = append(rows, simulate(t, n, 10000)...)
	}
	fmt.Println("| nodes | what happens | owners that came | collects | RPCs for each agent and minute: mean, most | MB sent by each agent: mean, most | until all agents know all |")
	fmt.Println("|---|---|---|---|---|---|---|")
	for _, r := range rows {
		known := "-"
		if r.known > 0 {
			known = fmt.Sprintf("%.1f s", r.known.Seconds())
		}
		fmt.Printf("| %d | %s | %d | %d | %.1f, %.0f | %.1f, %.1f | %s |\n", r.nodes, r.phase, r.owners, r.collects,
			r.calls.mean/r.lasted, r.calls.most/r.lasted, r.sent.mean/1e6, r.sent.most/1e6, known)
	}
	for i := 0; i < len(rows); i += 5 {
		checkSimulation(t, rows[i:min(i+5, len(rows))])
	}
}
