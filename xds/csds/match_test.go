package csds_test

import (
	"slices"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
)

func byID(id string) *matcherv3.NodeMatcher {
	return &matcherv3.NodeMatcher{NodeId: &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Exact{Exact: id}}}
}

func TestNodeMatchersChooseClients(t *testing.T) {
	w := newWorld(t)
	for id, metadata := range map[string]map[string]any{
		"prod/web-1": {"app": "web", "beta": true, "weight": 3.0, "tags": []any{"x", "y"}, "deep": map[string]any{"zone": "Z-1"}},
		"prod/web-2": {"app": "web", "none": nil},
		"test/cart":  nil,
	} {
		n := &corev3.Node{Id: id}
		if metadata != nil {
			var err error
			if n.Metadata, err = structpb.NewStruct(metadata); err != nil {
				t.Fatal(err)
			}
		}
		w.subscribe(w.connect(client.Options{Delta: true, Node: n}), xds.Cluster)
	}
	all := []string{"prod/web-1", "prod/web-2", "test/cart"}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		resp, err := w.fetch()
		if err != nil {
			t.Fatal(err)
		}
		if len(resp.GetConfig()) == len(all) {
			break
		}
		select {
		case <-tick.C:
		case <-w.ctx.Done():
			t.Fatal("not all clients are there")
		}
	}
	metadata := func(value, key string) string {
		return `{"nodeMetadatas":[{"path":[{"key":"` + key + `"}],"value":` + value + `}]}`
	}
	for _, c := range []struct {
		name     string
		matchers []string
		want     []string
	}{
		{"none", nil, all},
		{"an empty one", []string{`{}`}, all},
		{"exact", []string{`{"nodeId":{"exact":"test/cart"}}`}, all[2:]},
		{"exact, another case", []string{`{"nodeId":{"exact":"TEST/cart"}}`}, nil},
		{"ignore_case", []string{`{"nodeId":{"exact":"TEST/cart","ignoreCase":true}}`}, all[2:]},
		{"prefix", []string{`{"nodeId":{"prefix":"prod/"}}`}, all[:2]},
		{"suffix", []string{`{"nodeId":{"suffix":"-2"}}`}, all[1:2]},
		{"contains", []string{`{"nodeId":{"contains":"web"}}`}, all[:2]},
		{"safe_regex", []string{`{"nodeId":{"safeRegex":{"regex":"prod/.*-1"}}}`}, all[:1]},
		{"safe_regex of a part", []string{`{"nodeId":{"safeRegex":{"regex":"web"}}}`}, nil},
		{"one of two", []string{`{"nodeId":{"exact":"prod/web-1"}}`, `{"nodeId":{"exact":"test/cart"}}`}, []string{all[0], all[2]}},
		{"a string", []string{metadata(`{"stringMatch":{"exact":"web"}}`, "app")}, all[:2]},
		{"id and metadata", []string{`{"nodeId":{"suffix":"-2"},"nodeMetadatas":[{"path":[{"key":"app"}],"value":{"stringMatch":{"exact":"web"}}}]}`}, all[1:2]},
		{"two of metadata", []string{`{"nodeMetadatas":[{"path":[{"key":"app"}],"value":{"stringMatch":{"exact":"web"}}},{"path":[{"key":"beta"}],"value":{"boolMatch":true}}]}`}, all[:1]},
		{"below another", []string{`{"nodeMetadatas":[{"path":[{"key":"deep"},{"key":"zone"}],"value":{"stringMatch":{"prefix":"Z"}}}]}`}, all[:1]},
		{"below a string", []string{`{"nodeMetadatas":[{"path":[{"key":"app"},{"key":"zone"}],"value":{"presentMatch":true}}]}`}, nil},
		{"false", []string{metadata(`{"boolMatch":false}`, "beta")}, nil},
		{"a number", []string{metadata(`{"doubleMatch":{"exact":3}}`, "weight")}, all[:1]},
		{"a range", []string{metadata(`{"doubleMatch":{"range":{"start":3,"end":4}}}`, "weight")}, all[:1]},
		{"the end of a range", []string{metadata(`{"doubleMatch":{"range":{"start":2,"end":3}}}`, "weight")}, nil},
		{"null", []string{metadata(`{"nullMatch":{}}`, "none")}, all[1:2]},
		{"absent is not null", []string{metadata(`{"nullMatch":{}}`, "nothing")}, nil},
		{"present", []string{metadata(`{"presentMatch":true}`, "none")}, all[1:2]},
		{"absent", []string{metadata(`{"presentMatch":false}`, "app")}, all[2:]},
		{"in a list", []string{metadata(`{"listMatch":{"oneOf":{"stringMatch":{"exact":"y"}}}}`, "tags")}, all[:1]},
		{"not in a list", []string{metadata(`{"listMatch":{"oneOf":{"stringMatch":{"exact":"z"}}}}`, "tags")}, nil},
		{"either", []string{metadata(`{"orMatch":{"valueMatchers":[{"boolMatch":true},{"stringMatch":{"exact":"web"}}]}}`, "app")}, all[:2]},
	} {
		t.Run(c.name, func(t *testing.T) {
			var matchers []*matcherv3.NodeMatcher
			for _, text := range c.matchers {
				m := &matcherv3.NodeMatcher{}
				if err := protojson.Unmarshal([]byte(text), m); err != nil {
					t.Fatal(err)
				}
				matchers = append(matchers, m)
			}
			resp, err := w.fetch(matchers...)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, x := range resp.GetConfig() {
				got = append(got, x.GetNode().GetId())
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("clients %q, want %q", got, c.want)
			}
		})
	}
	for _, text := range []string{
		`{"nodeId":{}}`, `{"nodeId":{"safeRegex":{"regex":"("}}}`, metadata(`{}`, "app"), metadata(`{"stringMatch":{}}`, "app"),
		metadata(`{"listMatch":{"oneOf":{}}}`, "app"), metadata(`{"orMatch":{"valueMatchers":[{}]}}`, "app"),
	} {
		m := &matcherv3.NodeMatcher{}
		if err := protojson.Unmarshal([]byte(text), m); err != nil {
			t.Fatal(err)
		}
		if _, err := w.fetch(m); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v, want INVALID_ARGUMENT", text, err)
		}
	}
}
