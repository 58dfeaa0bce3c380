package schedule_test

import (
	"strings"
	"testing"

	"github.com/fingerpost/fingerpost/agent/schedule"
)

func TestLimitsComeFromFlagThenEnvironmentThenDefault(t *testing.T) {
	type env = map[string]string
	defaults := schedule.Limits{Collect: 16, PeerFetch: 16, Transcode: 2, Total: 32}
	for _, tc := range []struct {
		name  string
		flags schedule.Flags
		env   env
		want  schedule.Limits
		warn  []string // variables named by the warnings
	}{
		{name: "nothing set", want: defaults},
		{
			name: "own variables",
			env:  env{"FINGERPOST_COLLECT_LIMIT": "3", "FINGERPOST_PEER_FETCH_LIMIT": "4", "FINGERPOST_TRANSCODE_LIMIT": "5"},
			want: schedule.Limits{Collect: 3, PeerFetch: 4, Transcode: 5, Total: 32},
		},
		{
			name: "the work limit stands for all that are unset",
			env:  env{"FINGERPOST_WORK_LIMIT": "9", "FINGERPOST_TRANSCODE_LIMIT": "1"},
			want: schedule.Limits{Collect: 9, PeerFetch: 9, Transcode: 1, Total: 9},
		},
		{
			name:  "a flag goes before its variable, valid or not",
			flags: schedule.Flags{Collect: "2"},
			env:   env{"FINGERPOST_COLLECT_LIMIT": "x", "FINGERPOST_WORK_LIMIT": "9"},
			want:  schedule.Limits{Collect: 2, PeerFetch: 9, Transcode: 9, Total: 9},
		},
		{
			name:  "the work flag goes before its variable",
			flags: schedule.Flags{Work: "7"},
			env:   env{"FINGERPOST_WORK_LIMIT": "x", "FINGERPOST_COLLECT_LIMIT": "3"},
			want:  schedule.Limits{Collect: 3, PeerFetch: 7, Transcode: 7, Total: 7},
		},
		{
			name: "a value above the most is the most",
			env:  env{"FINGERPOST_COLLECT_LIMIT": "65", "FINGERPOST_WORK_LIMIT": "99999999999999999999"},
			want: schedule.Limits{Collect: 64, PeerFetch: 64, Transcode: 64, Total: 64},
		},
		{
			name: "an invalid variable turns its limit off and ends the fallback",
			env:  env{"FINGERPOST_COLLECT_LIMIT": "many", "FINGERPOST_WORK_LIMIT": "9"},
			want: schedule.Limits{Collect: 0, PeerFetch: 9, Transcode: 9, Total: 9},
			warn: []string{"FINGERPOST_COLLECT_LIMIT"},
		},
		{
			name: "an invalid work limit turns off all that would come from it, with one warning",
			env:  env{"FINGERPOST_TRANSCODE_LIMIT": "1", "FINGERPOST_WORK_LIMIT": "-1"},
			want: schedule.Limits{Transcode: 1},
			warn: []string{"FINGERPOST_WORK_LIMIT"},
		},
		{
			name: "zero, nothing, a fraction and a huge negative are invalid",
			env: env{
				"FINGERPOST_COLLECT_LIMIT": "0", "FINGERPOST_PEER_FETCH_LIMIT": "",
				"FINGERPOST_TRANSCODE_LIMIT": "1.5", "FINGERPOST_WORK_LIMIT": "-99999999999999999999",
			},
			want: schedule.Limits{},
			warn: []string{"FINGERPOST_COLLECT_LIMIT", "FINGERPOST_PEER_FETCH_LIMIT", "FINGERPOST_TRANSCODE_LIMIT", "FINGERPOST_WORK_LIMIT"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, warnings, err := schedule.ResolveLimits(tc.flags, func(k string) (string, bool) {
				v, ok := tc.env[k]
				return v, ok
			})
			if err != nil {
				t.Fatal(err)
			}
			if got != tc.want {
				t.Errorf("limits %+v, want %+v", got, tc.want)
			}
			if len(warnings) != len(tc.warn) {
				t.Fatalf("warnings %q, want one of each %q", warnings, tc.warn)
			}
			for i, w := range warnings {
				if !strings.HasPrefix(w, tc.warn[i]+"=") {
					t.Errorf("warning %q, want one of %s", w, tc.warn[i])
				}
			}
		})
	}
}

func TestBadLimitFlagIsAnError(t *testing.T) {
	for _, f := range []schedule.Flags{{Collect: "0"}, {PeerFetch: "-1"}, {Transcode: "x"}, {Work: " 3"}, {Work: "1e3"}} {
		if _, _, err := schedule.ResolveLimits(f, func(string) (string, bool) { return "", false }); err == nil {
			t.Errorf("flags %+v: no error", f)
		}
	}
}
