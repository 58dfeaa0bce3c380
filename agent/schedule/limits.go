package schedule

import (
	"errors"
	"fmt"
	"strconv"
)

// The defaults of [Limits], and the most that any of them can be.
const (
	DefaultCollect   = 16
	DefaultPeerFetch = 16
	DefaultTranscode = 2
	DefaultTotal     = 32
	MaxLimit         = 64
)

// Limits says how much work may run at one time. A zero field is no limit.
type Limits struct {
	Collect   int
	PeerFetch int
	Transcode int
	// Total is the global ceiling over all groups.
	Total int
}

// Flags are the limit flags of the command line, as written; an empty field is
// a flag that was not given.
type Flags struct {
	Collect   string // --collect-limit
	PeerFetch string // --peer-fetch-limit
	Transcode string // --transcode-limit
	Work      string // --work-limit
}

// The environment variables of the limits.
const (
	EnvCollect   = "FINGERPOST_COLLECT_LIMIT"
	EnvPeerFetch = "FINGERPOST_PEER_FETCH_LIMIT"
	EnvTranscode = "FINGERPOST_TRANSCODE_LIMIT"
	EnvWork      = "FINGERPOST_WORK_LIMIT"
)

// ResolveLimits decides the limits. Each is the first that is set of: its own
// flag, its own environment variable, the work limit (flag before variable),
// its default. The global ceiling is the work limit or its default. Values are
// positive integers, those above [MaxLimit] count as MaxLimit.
//
// A variable that is set, also to nothing, and is no positive integer turns
// the limit off that it would have given, and ends the search for another; it
// gives one line of warning however many limits it turns off. A flag that is
// no positive integer is an error: a usage error of the command.
//
// lookup is as os.LookupEnv.
func ResolveLimits(f Flags, lookup func(string) (string, bool)) (Limits, []string, error) {
	r := resolver{lookup: lookup, warned: map[string]bool{}}
	work := []source{{flag: f.Work, name: "--work-limit"}, {env: EnvWork}}
	of := func(flag, name, env string, def int) int {
		return r.resolve(append([]source{{flag: flag, name: name}, {env: env}}, work...), def)
	}
	l := Limits{
		Collect:   of(f.Collect, "--collect-limit", EnvCollect, DefaultCollect),
		PeerFetch: of(f.PeerFetch, "--peer-fetch-limit", EnvPeerFetch, DefaultPeerFetch),
		Transcode: of(f.Transcode, "--transcode-limit", EnvTranscode, DefaultTranscode),
		Total:     r.resolve(work, DefaultTotal),
	}
	if r.err != nil {
		return Limits{}, nil, r.err
	}
	return l, r.warnings, nil
}

// source is one place where a limit may be set: a flag or a variable.
type source struct{ flag, name, env string }

type resolver struct {
	lookup   func(string) (string, bool)
	warned   map[string]bool
	warnings []string
	err      error // of the first bad flag
}

func (r *resolver) resolve(from []source, def int) int {
	for _, s := range from {
		if s.env == "" {
			if s.flag == "" {
				continue
			}
			n, ok := parseLimit(s.flag)
			if !ok && r.err == nil {
				r.err = fmt.Errorf("%s %q is not a positive integer", s.name, s.flag)
			}
			return n
		}
		text, set := r.lookup(s.env)
		if !set {
			continue
		}
		n, ok := parseLimit(text)
		if !ok && !r.warned[s.env] {
			r.warned[s.env] = true
			r.warnings = append(r.warnings, fmt.Sprintf("%s=%q is not a positive integer: the limits that it would set are off", s.env, text))
		}
		return n
	}
	return def
}

// parseLimit returns 0 and false for what is no positive integer.
func parseLimit(s string) (int, bool) {
	n, err := strconv.Atoi(s)
	if n <= 0 || err != nil && !errors.Is(err, strconv.ErrRange) {
		return 0, false
	}
	return min(n, MaxLimit), true
}
