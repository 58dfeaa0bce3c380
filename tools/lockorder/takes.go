package lockorder

import (
	"fmt"
	"go/token"
	"go/types"
	"maps"
	"slices"

	"golang.org/x/tools/go/callgraph"
	"golang.org/x/tools/go/callgraph/cha"
	"golang.org/x/tools/go/callgraph/vta"
	"golang.org/x/tools/go/packages"
	"golang.org/x/tools/go/ssa"
	"golang.org/x/tools/go/ssa/ssautil"
)

// later are the functions of libraries that do not call what they are given
// before they return.
var later = map[string]bool{
	"(*sync.WaitGroup).Go":                     true,
	"(*golang.org/x/sync/errgroup.Group).Go":   true,
	"context.AfterFunc":                        true,
	"time.AfterFunc":                           true,
	"runtime.AddCleanup":                       true,
	"sync.OnceFunc":                            true,
	"(*net/http.ServeMux).HandleFunc":          true,
	"(*google.golang.org/grpc.Server).Serve":   true,
	"google.golang.org/grpc.NewServer":         true,
	"google.golang.org/grpc.NewClient":         true,
	"google.golang.org/grpc.WithContextDialer": true,
}

// function is what is known of a function.
type function struct {
	fn *ssa.Function
	// calls leads from each call to what it may be of. Those that start a
	// goroutine are not in it.
	calls map[ssa.CallInstruction][]*function
	takes set // by itself and by all that it calls
	// leaves are locks that are held when it returns and were not before, frees
	// those that it lets go without having taken them.
	leaves, frees set
	walked        bool // just now
}

// takes returns a line for each lock that is taken under another one against
// the order, and for each pair of the order that never happens.
func (c *checker) takes(pkgs []*packages.Package) (broken []string) {
	prog, _ := ssautil.Packages(pkgs, ssa.InstantiateGenerics)
	prog.Build()
	all := ssautil.AllFunctions(prog)
	graph := vta.CallGraph(all, cha.CallGraph(prog))

	functions := map[*ssa.Function]*function{}
	for fn := range all {
		if len(fn.Blocks) > 0 {
			functions[fn] = &function{fn: fn, calls: map[ssa.CallInstruction][]*function{}, takes: set{}, leaves: set{}, frees: set{}}
		}
	}
	ordered := slices.SortedFunc(maps.Values(functions), func(a, b *function) int { return int(a.fn.Pos() - b.fn.Pos()) })
	for _, f := range ordered {
		if n := graph.Nodes[f.fn]; n != nil {
			f.link(n, functions)
		}
	}
	for grew := true; grew; {
		grew = false
		for _, f := range ordered {
			for lock := range c.own(f) {
				grew = f.takes.add(set{lock: true}) || grew
			}
			for _, callees := range f.calls {
				for _, callee := range callees {
					grew = f.takes.add(callee.takes) || grew
				}
			}
			leaves, frees := c.walk(f, nil, nil)
			grew = f.leaves.add(leaves) || grew
			grew = f.frees.add(frees) || grew
		}
	}

	seen := map[string]set{}
	for _, f := range ordered {
		c.walk(f, nil, func(at token.Pos, held, taken set, through string) {
			for h := range held {
				for t := range taken {
					if seen[h] == nil {
						seen[h] = set{}
					}
					seen[h][t] = true
					if !c.order.Pairs[h][t] {
						broken = append(broken, fmt.Sprintf("%s: %s is taken under %s%s, which no written order allows", c.at(at), t, h, through))
					}
				}
			}
		})
	}
	for h, ts := range c.order.Pairs {
		for t := range ts {
			if !seen[h][t] {
				broken = append(broken, fmt.Sprintf("the docs let %s be taken under %s, which never happens", t, h))
			}
		}
	}
	return broken
}

// link notes what the calls of a function lead to. A function that a library
// is given counts as called by the library.
func (f *function) link(n *callgraph.Node, functions map[*ssa.Function]*function) {
	add := func(site ssa.CallInstruction, fn *ssa.Function) {
		if callee := functions[fn]; callee != nil && !slices.Contains(f.calls[site], callee) {
			f.calls[site] = append(f.calls[site], callee)
		}
	}
	for _, e := range n.Out {
		if e.Site == nil {
			continue
		}
		if _, started := e.Site.(*ssa.Go); started {
			continue
		}
		add(e.Site, e.Callee.Func)
		callee := e.Callee.Func
		if generic := callee.Origin(); generic != nil {
			callee = generic
		}
		if len(callee.Blocks) > 0 || later[callee.RelString(nil)] {
			continue
		}
		for _, arg := range e.Site.Common().Args {
			if fn := given(arg); fn != nil {
				add(e.Site, fn)
			}
		}
	}
}

// given is the function that a value is, as far as one sees.
func given(v ssa.Value) *ssa.Function {
	switch v := v.(type) {
	case *ssa.Function:
		return v
	case *ssa.MakeClosure:
		return v.Fn.(*ssa.Function)
	case *ssa.ChangeType:
		return given(v.X)
	case *ssa.MakeInterface:
		return given(v.X)
	}
	return nil
}

// own are the locks that a function takes itself.
func (c *checker) own(f *function) set {
	s := set{}
	for _, b := range f.fn.Blocks {
		for _, i := range b.Instrs {
			call, ok := i.(ssa.CallInstruction)
			if _, started := i.(*ssa.Go); !ok || started {
				continue
			}
			if lock, takes, _ := c.lock(call.Common()); takes {
				s[lock] = true
			}
		}
	}
	return s
}

// lock tells whether a call takes or frees a lock, and which.
func (c *checker) lock(call *ssa.CallCommon) (name string, takes, frees bool) {
	fn := call.StaticCallee()
	if fn == nil || fn.Signature.Recv() == nil || !isLock(fn.Signature.Recv().Type()) {
		return "", false, false
	}
	switch fn.Name() {
	case "Lock", "RLock", "TryLock", "TryRLock":
		takes = true
	case "Unlock", "RUnlock":
		frees = true
	default:
		return "", false, false
	}
	return c.name(call.Args[0]), takes, frees
}

// name is that of the lock behind a value.
func (c *checker) name(v ssa.Value) string {
	switch v := v.(type) {
	case *ssa.UnOp:
		return c.name(v.X)
	case *ssa.FieldAddr:
		st := v.X.Type().Underlying().(*types.Pointer).Elem().Underlying().(*types.Struct)
		if name := c.names[st.Field(v.Field).Origin()]; name != "" {
			return name
		}
	case *ssa.Global:
		if name := c.names[v.Object()]; name != "" {
			return name
		}
	}
	return "a lock without a name, at " + c.at(v.Pos())
}

// walk follows all paths of a function that begins with these locks held,
// tells of each lock that is taken while others are, and returns which are held
// and were freed at its end.
func (c *checker) walk(f *function, begin set, tell func(at token.Pos, held, taken set, through string)) (leaves, frees set) {
	f.walked = true
	defer func() { f.walked = false }()
	leaves, frees = set{}, set{}
	first := f.fn.Blocks[0]
	before := map[*ssa.BasicBlock]set{first: {}}
	before[first].add(begin)
	work := []*ssa.BasicBlock{first}
	for len(work) > 0 {
		b := work[0]
		work = work[1:]
		held := maps.Clone(before[b])
		step := func(call ssa.CallInstruction) {
			if lock, takes, lets := c.lock(call.Common()); takes {
				if tell != nil {
					tell(call.Pos(), held, set{lock: true}, "")
				}
				held[lock] = true
				return
			} else if lets {
				if !held[lock] {
					frees[lock] = true
				}
				delete(held, lock)
				return
			}
			callees := f.calls[call]
			for _, callee := range callees {
				switch {
				case tell == nil || len(held) == 0:
				case len(callee.frees) > 0 && !callee.walked:
					// What it takes, it may take without them.
					c.walk(callee, held, tell)
				default:
					tell(call.Pos(), held, callee.takes, " by "+callee.fn.RelString(nil))
				}
			}
			if len(callees) != 1 {
				return // which of them it is, is not known
			}
			for lock := range callees[0].frees {
				if !held[lock] {
					frees[lock] = true
				}
				delete(held, lock)
			}
			held.add(callees[0].leaves)
		}
		for _, i := range b.Instrs {
			switch i := i.(type) {
			case *ssa.Go:
			case *ssa.Defer: // at the end
			case *ssa.RunDefers:
				for _, d := range slices.Backward(f.defers()) {
					step(d)
				}
			case *ssa.Return:
				leaves.add(held)
			case ssa.CallInstruction:
				step(i)
			}
		}
		for _, s := range b.Succs {
			if before[s] == nil {
				before[s] = set{}
			} else if !grows(before[s], held) {
				continue
			}
			before[s].add(held)
			work = append(work, s)
		}
	}
	return leaves, frees
}

func grows(s, by set) bool {
	for l := range by {
		if !s[l] {
			return true
		}
	}
	return false
}

// defers are the deferred calls of a function in the order of the text.
func (f *function) defers() (ds []*ssa.Defer) {
	for _, b := range f.fn.Blocks {
		for _, i := range b.Instrs {
			if d, ok := i.(*ssa.Defer); ok {
				ds = append(ds, d)
			}
		}
	}
	return ds
}
