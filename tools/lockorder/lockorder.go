// Package lockorder compares the locks of a Go module with what its docs say
// of them: that each is there, that each has its comment, and that none is
// taken while another is held but in a written order.
//
// The acquisitions are found by static analysis of all code but tests: what is
// held at each call, along every path of a function, and what a call may take,
// through interfaces and function values as well (go/callgraph/vta). A lock is
// a field or a variable of type sync.Mutex or sync.RWMutex, of whichever value:
// two of one type are not told apart, and taking one under the other counts as
// a break. Reading counts as writing. Code that is started in a goroutine of
// its own holds nothing at first. What a library calls back later, or from a
// goroutine of its own, is not seen as taken by the call that handed it over
// where its name is one of those in later.
package lockorder

import (
	"fmt"
	"go/ast"
	"go/token"
	"go/types"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/tools/go/packages"
)

// Order is what the docs say.
type Order struct {
	// Locks are those that have a row in a table, as Type.field.
	Locks map[string]bool
	// Pairs holds, for each lock, those that may be taken while it is held.
	Pairs map[string]map[string]bool
}

var (
	row   = regexp.MustCompile("(?m)^\\| *(`[^|]*`)[^|]*\\|")
	named = regexp.MustCompile("`([A-Za-z]\\w*\\.\\w+)`")
)

// ParseOrder reads the docs: chains of locks with arrows between them, one a
// line, and the first column of tables.
func ParseOrder(doc string) Order {
	o := Order{Locks: map[string]bool{}, Pairs: map[string]map[string]bool{}}
	for line := range strings.Lines(doc) {
		if !strings.HasPrefix(line, "`") || !strings.Contains(line, "→") {
			continue
		}
		chain := named.FindAllStringSubmatch(line, -1)
		for i := range chain {
			for _, later := range chain[i+1:] {
				o.pair(chain[i][1], later[1])
			}
		}
	}
	for _, m := range row.FindAllStringSubmatch(doc, -1) {
		for _, lock := range named.FindAllStringSubmatch(m[1], -1) {
			o.Locks[lock[1]] = true
		}
	}
	return o
}

func (o *Order) pair(held, taken string) {
	if o.Pairs[held] == nil {
		o.Pairs[held] = map[string]bool{}
	}
	o.Pairs[held][taken] = true
}

// Check analyses the packages that the patterns name in the module at dir, and
// returns one line for each difference from the order, sorted. Packages below a
// directory named test are left out.
func Check(dir string, order Order, patterns ...string) ([]string, error) {
	pkgs, err := packages.Load(&packages.Config{Dir: dir, Mode: packages.LoadSyntax | packages.NeedModule}, patterns...)
	if err != nil {
		return nil, err
	}
	pkgs = slices.DeleteFunc(pkgs, func(p *packages.Package) bool { return strings.Contains(p.PkgPath, "/test/") })
	var broken []string
	for _, p := range pkgs {
		for _, e := range p.Errors {
			return nil, fmt.Errorf("%s: %w", p.PkgPath, e)
		}
	}
	if len(pkgs) == 0 {
		return nil, fmt.Errorf("no packages in %s", dir)
	}
	c := &checker{root: dir, order: order, fset: pkgs[0].Fset, found: map[string]bool{}, names: map[types.Object]string{}}
	for _, p := range pkgs {
		broken = append(broken, c.comments(p)...)
	}
	for lock := range order.Locks {
		if !c.found[lock] {
			broken = append(broken, fmt.Sprintf("%s is in the docs and not in the code", lock))
		}
	}
	broken = append(broken, c.takes(pkgs)...)
	slices.Sort(broken)
	return slices.Compact(broken), nil
}

type checker struct {
	root  string
	order Order
	fset  *token.FileSet
	found map[string]bool
	names map[types.Object]string // of the fields and variables that are locks
}

// isLock tells whether a type is a mutex or a pointer to one.
func isLock(t types.Type) bool {
	if p, ok := types.Unalias(t).(*types.Pointer); ok {
		t = p.Elem()
	}
	n, ok := types.Unalias(t).(*types.Named)
	if !ok || n.Obj().Pkg() == nil || n.Obj().Pkg().Path() != "sync" {
		return false
	}
	return n.Obj().Name() == "Mutex" || n.Obj().Name() == "RWMutex"
}

// comments notes the locks of a package, and says which lack a comment or a
// row in the docs.
func (c *checker) comments(p *packages.Package) (broken []string) {
	lock := func(name string, obj types.Object, doc *ast.CommentGroup) {
		at := c.at(obj.Pos())
		c.names[obj] = name
		if doc == nil || c.fset.Position(doc.End()).Line != c.fset.Position(obj.Pos()).Line-1 {
			broken = append(broken, fmt.Sprintf("%s: %s has no comment right above it", at, name))
		}
		if !c.order.Locks[name] {
			broken = append(broken, fmt.Sprintf("%s: %s is not in the docs", at, name))
		}
		if c.found[name] {
			broken = append(broken, fmt.Sprintf("%s: %s is the name of two locks", at, name))
		}
		c.found[name] = true
	}
	object := func(id *ast.Ident) types.Object {
		if obj := p.TypesInfo.Defs[id]; obj != nil && isLock(obj.Type()) {
			return obj
		}
		return nil
	}
	for _, f := range p.Syntax {
		var owner string // the type or variable that is declared
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.TypeSpec:
				owner = n.Name.Name
			case *ast.GenDecl:
				for _, s := range n.Specs {
					v, ok := s.(*ast.ValueSpec)
					if !ok {
						continue
					}
					doc := v.Doc
					if doc == nil && len(n.Specs) == 1 {
						doc = n.Doc
					}
					for _, id := range v.Names {
						owner = id.Name
						if obj := object(id); obj != nil {
							lock(p.Name+"."+id.Name, obj, doc)
						}
					}
				}
			case *ast.StructType:
				for _, field := range n.Fields.List {
					ids := field.Names
					if len(ids) == 0 { // embedded
						if sel, ok := field.Type.(*ast.SelectorExpr); ok {
							ids = []*ast.Ident{sel.Sel}
						}
					}
					for _, id := range ids {
						obj := object(id)
						if obj == nil && len(field.Names) == 0 {
							obj = c.embedded(p, n, id.Name)
						}
						if obj != nil {
							lock(owner+"."+id.Name, obj, field.Doc)
						}
					}
				}
			}
			return true
		})
	}
	return broken
}

// embedded is the field of a struct that embeds a lock of that name.
func (c *checker) embedded(p *packages.Package, n *ast.StructType, name string) types.Object {
	st, ok := p.TypesInfo.TypeOf(n).(*types.Struct)
	if !ok {
		return nil
	}
	for f := range st.Fields() {
		if f.Embedded() && f.Name() == name && isLock(f.Type()) {
			return f
		}
	}
	return nil
}

// at is a position as path:line, the path from the root.
func (c *checker) at(pos token.Pos) string {
	p := c.fset.Position(pos)
	root, err := filepath.Abs(c.root)
	if err == nil {
		if rel, err := filepath.Rel(root, p.Filename); err == nil {
			p.Filename = rel
		}
	}
	return fmt.Sprintf("%s:%d", p.Filename, p.Line)
}

// set is a set of locks by name.
type set map[string]bool

func (s set) add(o set) (grew bool) {
	for l := range o {
		grew = grew || !s[l]
		s[l] = true
	}
	return grew
}
