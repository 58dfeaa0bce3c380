package resources

import (
	"fmt"
	"regexp/syntax"
	"strings"
	"unicode/utf8"

	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
)

// maxRegex bounds the program of a regular expression. Envoy refuses a route
// table with one of more than re2.max_program_size.error_level instructions,
// 100 where the runtime does not say otherwise.
const maxRegex = 100

// checkRegex returns an error for what Envoy would not compile. Both take the
// syntax of RE2, but Envoy has it match bytes, of which none is \x{100}.
func checkRegex(re string) error {
	if strings.Contains(re, `\x{`) {
		return fmt.Errorf(`regular expression %q has a character by number, as \x{e9}`, re)
	}
	tree, err := syntax.Parse(re, syntax.Perl)
	if err != nil {
		return fmt.Errorf("regular expression %q: %w", re, err)
	}
	prog, err := syntax.Compile(tree.Simplify())
	if err != nil {
		return fmt.Errorf("regular expression %q: %w", re, err)
	}
	if n := programSize(prog); n > maxRegex {
		return fmt.Errorf("regular expression %q has %d instructions, more than %d", re, n, maxRegex)
	}
	return nil
}

// programSize is about what RE2 counts, never less: it works on bytes where Go
// does on characters, and adds a few instructions of its own.
func programSize(prog *syntax.Prog) int {
	n := 4
	for i := range prog.Inst {
		switch in := &prog.Inst[i]; {
		case in.Op == syntax.InstRune1:
			n += utf8.RuneLen(in.Rune[0])
		case in.Op == syntax.InstRune && in.Rune[len(in.Rune)-1] < utf8.RuneSelf:
			n += (len(in.Rune) + 1) / 2
		case in.Op == syntax.InstRune || in.Op == syntax.InstRuneAny || in.Op == syntax.InstRuneAnyNotNL:
			n += 8
		default:
			n++
		}
	}
	return n
}

// regexes returns every regular expression of a match.
func regexes(m *routev3.RouteMatch) []string {
	var res []string
	add := func(r *matcherv3.RegexMatcher) {
		if r != nil {
			res = append(res, r.GetRegex())
		}
	}
	add(m.GetSafeRegex())
	for _, h := range m.GetHeaders() {
		add(h.GetStringMatch().GetSafeRegex())
	}
	for _, q := range m.GetQueryParameters() {
		add(q.GetStringMatch().GetSafeRegex())
	}
	return res
}
