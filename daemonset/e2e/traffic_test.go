//go:build kind

package e2e_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"
)

// line is a line that the workload writes; see package workload.
type line struct {
	Time    time.Time `json:"time"`
	Kind    string    `json:"kind"`
	Code    string    `json:"code"`
	Message string    `json:"message"`
	Service string    `json:"service"`
	Server  string    `json:"server"`
	Millis  int64     `json:"ms"`
	Tally   *struct {
		Unary    int64               `json:"unary"`
		Failed   int64               `json:"failed"`
		Messages int64               `json:"messages"`
		Open     int64               `json:"open"`
		Slowest  int64               `json:"slowest_ms"`
		Answered map[string][]string `json:"answered"`
	} `json:"tally"`
}

// logs reads what the containers of pods with a label have written since.
func logs(t testing.TB, pod, container string, since time.Time) ([]line, error) {
	text, err := tryKubectl(t, "-n", shop, "logs", pod, "-c", container, "--since-time", since.UTC().Format(time.RFC3339))
	if err != nil {
		return nil, err
	}
	var lines []line
	for s := bufio.NewScanner(strings.NewReader(text)); s.Scan(); {
		var l line
		if err := json.Unmarshal(s.Bytes(), &l); err == nil && l.Time.After(since) {
			lines = append(lines, l)
		}
	}
	return lines, nil
}

// report is what callers saw during a scenario.
type report struct {
	calls, messages int64
	slowest         time.Duration // of the answered calls
	failed, cut     []line
	start           time.Time
}

// watched is a scenario during which callers call.
type watched struct {
	label   string
	exclude map[string]bool // pods whose callers do not count
	start   time.Time
}

// watch begins a scenario with the callers that have the label. The callers
// must be calling.
func watch(t testing.TB, label string) *watched {
	t.Helper()
	// The clocks of the nodes are the host's.
	return &watched{label: label, start: time.Now(), exclude: map[string]bool{}}
}

// end ends the scenario: what was called until now is in the report.
func (w *watched) end(t testing.TB) *report {
	t.Helper()
	end := time.Now()
	r := &report{start: w.start}
	for _, p := range pods(t, shop, w.label) {
		if w.exclude[p.Name] {
			continue
		}
		var lines []line
		eventually(t, ripe, func() error {
			var err error
			if lines, err = logs(t, p.Name, "client", w.start); err != nil {
				return err
			}
			// Calls that ran at the end have ended once a tally is later
			// than that by the longest deadline.
			if len(lines) == 0 || lines[len(lines)-1].Time.Before(end) {
				return fmt.Errorf("%s has not written since", p.Name)
			}
			return nil
		})
		r.add(lines)
	}
	return r
}

func (r *report) add(lines []line) {
	var first, last *line
	for i := range lines {
		l := &lines[i]
		switch l.Kind {
		case "unary":
			r.failed = append(r.failed, *l)
		case "stream":
			r.cut = append(r.cut, *l)
		case "tally":
			// The first tally counts from before; a restarted caller from 0.
			if first == nil {
				first = l
			} else if l.Tally.Unary < last.Tally.Unary {
				r.calls += last.Tally.Unary - first.Tally.Unary
				r.messages += last.Tally.Messages - first.Tally.Messages
				first = l
			}
			last = l
			r.slowest = max(r.slowest, time.Duration(l.Tally.Slowest)*time.Millisecond)
		}
	}
	if first != nil {
		r.calls += last.Tally.Unary - first.Tally.Unary
		r.messages += last.Tally.Messages - first.Tally.Messages
	}
}

// cutOf are the streams that broke though their server lives on; a stream that
// had no server yet counts. gone are the pods that were to end.
func (r *report) cutOf(gone map[string]bool) []line {
	var lines []line
	for _, l := range r.cut {
		if l.Server == "" || !gone[l.Server] {
			lines = append(lines, l)
		}
	}
	return lines
}

// summary says what failed, by code and text, with numbers and the time of the
// first and last.
func summary(lines []line, start time.Time) string {
	type seen struct {
		n           int
		first, last time.Duration
	}
	by := map[string]*seen{}
	for _, l := range lines {
		key := fmt.Sprintf("%s %s %s: %s", l.Kind, l.Service, l.Code, l.Message)
		if by[key] == nil {
			by[key] = &seen{first: l.Time.Sub(start)}
		}
		by[key].n++
		by[key].last = l.Time.Sub(start)
	}
	var rows []string
	for _, key := range slices.Sorted(maps.Keys(by)) {
		s := by[key]
		rows = append(rows, fmt.Sprintf("  %d times, %.1f s to %.1f s: %s", s.n, s.first.Seconds(), s.last.Seconds(), key))
	}
	return strings.Join(rows, "\n")
}

// names are the pods with a label at the moment.
func names(t testing.TB, label string) map[string]bool {
	t.Helper()
	all := map[string]bool{}
	for _, p := range pods(t, shop, label) {
		all[p.Name] = true
	}
	return all
}

// row is one line of the table of results.
type row struct {
	scenario string
	report   *report
	cut      int // streams to pods that live on
	check    time.Duration
	took     time.Duration
	note     string
}

// results are printed at the end.
var results []row

// verdict writes the row of a scenario, and fails the test if more calls
// failed than may, or if streams were cut to pods that live on. It also fails
// it if there were too few calls to say anything.
func verdict(t *testing.T, name string, r *report, gone map[string]bool, took time.Duration, allowed int, note string) {
	t.Helper()
	cut := r.cutOf(gone)
	checked := check(t)
	results = append(results, row{name, r, len(cut), checked, took, note})
	t.Logf("%s: %d calls, %d failed, %d stream messages, %d streams cut (%d of pods that live on), slowest %v; every agent right after %.1f s; took %.0f s %s",
		name, r.calls, len(r.failed), r.messages, len(r.cut), len(cut), r.slowest, checked.Seconds(), took.Seconds(), note)
	if len(r.failed) > 0 {
		t.Logf("failed:\n%s", summary(r.failed, r.start))
	}
	if len(cut) > 0 {
		t.Logf("cut:\n%s", summary(cut, r.start))
	}
	if len(r.failed) > allowed {
		t.Errorf("%d calls failed, at most %d may", len(r.failed), allowed)
	}
	if len(cut) > 0 {
		t.Errorf("%d streams were cut to pods that live on", len(cut))
	}
	if least := int64(took.Seconds()) * 5; r.calls < least || r.messages < least {
		t.Errorf("only %d calls and %d messages in %v", r.calls, r.messages, took)
	}
}

func printResults() {
	fmt.Println("\n| scenario | calls | failed | messages on streams | cut, of pods that live on | slowest call | every agent right after | took | |\n|---|---|---|---|---|---|---|---|---|")
	for _, r := range results {
		fmt.Printf("| %s | %d | %d | %d | %d | %d ms | %.1f s | %.0f s | %s |\n", r.scenario, r.report.calls, len(r.report.failed), r.report.messages, r.cut, r.report.slowest.Milliseconds(), r.check.Seconds(), r.took.Seconds(), r.note)
	}
}
