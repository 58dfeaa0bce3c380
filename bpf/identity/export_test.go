package identity

// UIDsIn is what the cgroup lines of a process name.
var UIDsIn = uidsIn

// BeforeVerdict lets f run after a process's cgroups were read, before it is
// looked whether the process still is there.
func (p *Prover) BeforeVerdict(f func(pid int)) {
	read := p.process.cgroups
	p.process.cgroups = func(pid int) ([]byte, error) {
		text, err := read(pid)
		f(pid)
		return text, err
	}
}

// Verdict is what one method says, for the table of how two make one proof.
type Verdict struct {
	Pod     *Pod
	Reason  string
	Host    bool
	Claims  []Pod
	UID     string
	Pending bool
}

// Join makes one proof of what both methods say.
func Join(net, proc Verdict) Proof {
	in := func(v Verdict) verdict {
		return verdict{pod: v.Pod, reason: v.Reason, pending: v.Pending, host: v.Host, claims: v.Claims, uid: v.UID}
	}
	return join(in(net), in(proc))
}
