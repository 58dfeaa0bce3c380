// Package preflight looks at a cluster and at a machine, and says what they lack
// and what follows from that. It is fingerpost check. It asks with the rights of
// whoever runs it, and changes nothing: where it has to know what the API server
// would do with a pod it creates one with dryRun.
package preflight

// State says how a thing stands.
type State string

// The states, the worst last.
const (
	Good    State = "good"
	Note    State = "note"    // something is not there, and all works without it but what Means says
	Unknown State = "unknown" // it could not be found out
	Missing State = "missing" // something that is needed
)

// Finding is one thing that was looked at.
type Finding struct {
	About string `json:"about"`
	State State  `json:"state"`
	Found string `json:"found"`
	// Means says what follows, and what to do; empty where nothing does.
	Means string `json:"means,omitempty"`
}

// Report is what was found.
type Report struct {
	// Node is the host's name of the machine on which the check ran.
	Node string `json:"node"`
	// Cluster is the address of the API server; empty if none was asked.
	Cluster  string    `json:"cluster,omitempty"`
	Findings []Finding `json:"findings"`
}

// Missing counts the findings of this state.
func (r *Report) Missing() int {
	n := 0
	for _, f := range r.Findings {
		if f.State == Missing {
			n++
		}
	}
	return n
}

func (r *Report) add(about string, state State, found, means string) {
	r.Findings = append(r.Findings, Finding{about, state, found, means})
}
