package csds

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"google.golang.org/protobuf/types/known/structpb"
)

// nodes returns whether one of the matchers accepts a node; none accept all. Of
// one matcher everything must agree (envoy/type/matcher/v3/node.proto).
func nodes(matchers []*matcherv3.NodeMatcher) (func(*corev3.Node) bool, error) {
	var any []func(*corev3.Node) bool
	for _, m := range matchers {
		id := func(string) bool { return true }
		if m.GetNodeId() != nil {
			var err error
			if id, err = text(m.GetNodeId()); err != nil {
				return nil, fmt.Errorf("node_id: %w", err)
			}
		}
		var all []func(*structpb.Value) bool
		for _, s := range m.GetNodeMetadatas() {
			f, err := field(s)
			if err != nil {
				return nil, fmt.Errorf("node_metadatas: %w", err)
			}
			all = append(all, f)
		}
		any = append(any, func(n *corev3.Node) bool {
			metadata := structpb.NewStructValue(n.GetMetadata())
			for _, f := range all {
				if !f(metadata) {
					return false
				}
			}
			return id(n.GetId())
		})
	}
	return func(n *corev3.Node) bool {
		for _, f := range any {
			if f(n) {
				return true
			}
		}
		return len(any) == 0
	}, nil
}

// text is one StringMatcher (envoy/type/matcher/v3/string.proto).
func text(m *matcherv3.StringMatcher) (func(string) bool, error) {
	fold := func(s string) string {
		if m.GetIgnoreCase() {
			return strings.ToLower(s)
		}
		return s
	}
	with := func(f func(s, part string) bool, part string) (func(string) bool, error) {
		part = fold(part)
		return func(s string) bool { return f(fold(s), part) }, nil
	}
	switch p := m.GetMatchPattern().(type) {
	case *matcherv3.StringMatcher_Exact:
		return with(func(s, whole string) bool { return s == whole }, p.Exact)
	case *matcherv3.StringMatcher_Prefix:
		return with(strings.HasPrefix, p.Prefix)
	case *matcherv3.StringMatcher_Suffix:
		return with(strings.HasSuffix, p.Suffix)
	case *matcherv3.StringMatcher_Contains:
		return with(strings.Contains, p.Contains)
	case *matcherv3.StringMatcher_SafeRegex:
		// The whole string has to match; ignore_case has no effect.
		re, err := regexp.Compile("^(?:" + p.SafeRegex.GetRegex() + ")$")
		if err != nil {
			return nil, err
		}
		return re.MatchString, nil
	}
	return nil, errors.New("only exact, prefix, suffix, contains and safe_regex are known")
}

// field is one StructMatcher: the value at the end of a path of keys.
func field(m *matcherv3.StructMatcher) (func(*structpb.Value) bool, error) {
	f, err := value(m.GetValue())
	if err != nil {
		return nil, err
	}
	return func(v *structpb.Value) bool {
		for _, segment := range m.GetPath() {
			v = v.GetStructValue().GetFields()[segment.GetKey()]
		}
		return f(v)
	}, nil
}

// value is one ValueMatcher (envoy/type/matcher/v3/value.proto). A value that is
// absent is nil, which only present_match: false accepts.
func value(m *matcherv3.ValueMatcher) (func(*structpb.Value) bool, error) {
	switch p := m.GetMatchPattern().(type) {
	case *matcherv3.ValueMatcher_NullMatch_:
		return is[*structpb.Value_NullValue](func(*structpb.Value) bool { return true }), nil
	case *matcherv3.ValueMatcher_BoolMatch:
		return is[*structpb.Value_BoolValue](func(v *structpb.Value) bool { return v.GetBoolValue() == p.BoolMatch }), nil
	case *matcherv3.ValueMatcher_PresentMatch:
		return func(v *structpb.Value) bool { return (v != nil) == p.PresentMatch }, nil
	case *matcherv3.ValueMatcher_DoubleMatch:
		return is[*structpb.Value_NumberValue](func(v *structpb.Value) bool {
			if r := p.DoubleMatch.GetRange(); r != nil {
				return r.GetStart() <= v.GetNumberValue() && v.GetNumberValue() < r.GetEnd()
			}
			return v.GetNumberValue() == p.DoubleMatch.GetExact()
		}), nil
	case *matcherv3.ValueMatcher_StringMatch:
		f, err := text(p.StringMatch)
		if err != nil {
			return nil, err
		}
		return is[*structpb.Value_StringValue](func(v *structpb.Value) bool { return f(v.GetStringValue()) }), nil
	case *matcherv3.ValueMatcher_ListMatch:
		f, err := value(p.ListMatch.GetOneOf())
		if err != nil {
			return nil, err
		}
		return func(v *structpb.Value) bool {
			for _, v := range v.GetListValue().GetValues() {
				if f(v) {
					return true
				}
			}
			return false
		}, nil
	case *matcherv3.ValueMatcher_OrMatch:
		var some []func(*structpb.Value) bool
		for _, m := range p.OrMatch.GetValueMatchers() {
			f, err := value(m)
			if err != nil {
				return nil, err
			}
			some = append(some, f)
		}
		return func(v *structpb.Value) bool {
			for _, f := range some {
				if f(v) {
					return true
				}
			}
			return false
		}, nil
	}
	return nil, errors.New("a value matcher without a known pattern")
}

// is adds to a condition that the value is of one kind.
func is[Kind any](f func(*structpb.Value) bool) func(*structpb.Value) bool {
	return func(v *structpb.Value) bool {
		_, ok := v.GetKind().(Kind)
		return ok && f(v)
	}
}
