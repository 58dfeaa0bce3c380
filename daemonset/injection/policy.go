package injection

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// PolicyName is the name of both policies and their bindings.
const PolicyName = "fingerpost-inject"

const policyComment = `# Written by "fingerpost inject --policies" (daemonset/injection), not by hand.
# The first policy changes pods that are created with the label ` + Label + `:
# envoy or grpc. The second one refuses, and says why, what the first one leaves
# alone, and pods that ask for injection and come without it. Both fail closed: a
# pod that runs without its sidecar fails at its first call, where nobody looks
# for the cause; one that is refused is an Event of its controller, which tries
# again.
`

// Policies returns, as YAML, the admission policies and their bindings that do
// what [Manifests] does to the pods that are created with the label. They need
// Kubernetes 1.36, the validating one alone 1.30.
func Policies(o Options) ([]byte, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	mutating, err := mutatingPolicy(o)
	if err != nil {
		return nil, err
	}
	out := bytes.NewBufferString(policyComment)
	for i, object := range []any{
		mutating,
		&admissionv1.MutatingAdmissionPolicyBinding{
			TypeMeta:   typeMeta("MutatingAdmissionPolicyBinding"),
			ObjectMeta: objectMeta(),
			Spec:       admissionv1.MutatingAdmissionPolicyBindingSpec{PolicyName: PolicyName},
		},
		validatingPolicy(o),
		&admissionv1.ValidatingAdmissionPolicyBinding{
			TypeMeta:   typeMeta("ValidatingAdmissionPolicyBinding"),
			ObjectMeta: objectMeta(),
			Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
				PolicyName: PolicyName, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
			},
		},
	} {
		text, err := yaml.Marshal(object)
		if err != nil {
			return nil, err
		}
		if i > 0 {
			out.WriteString("---\n")
		}
		out.Write(bytes.ReplaceAll(text, []byte("status: {}\n"), nil))
	}
	return out.Bytes(), nil
}

func typeMeta(kind string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: admissionv1.SchemeGroupVersion.String(), Kind: kind}
}

func objectMeta() metav1.ObjectMeta {
	return metav1.ObjectMeta{Name: PolicyName, Labels: map[string]string{"app.kubernetes.io/name": "fingerpost"}}
}

// created matches pods that are created with the label, in so far as it matches
// the requirement.
func created(operator metav1.LabelSelectorOperator, values ...string) *admissionv1.MatchResources {
	return &admissionv1.MatchResources{
		MatchPolicy: new(admissionv1.Equivalent),
		ObjectSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
			{Key: Label, Operator: metav1.LabelSelectorOpExists},
			{Key: Label, Operator: operator, Values: values},
		}},
		ResourceRules: []admissionv1.NamedRuleWithOperations{{RuleWithOperations: admissionv1.RuleWithOperations{
			Operations: []admissionv1.OperationType{admissionv1.Create},
			Rule:       admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods"}},
		}}},
	}
}

// notMirror leaves out what the kubelet shows of pods that it read from files: it
// runs them whatever the API server says.
var notMirror = admissionv1.MatchCondition{
	Name: "not-mirror", Expression: `!object.metadata.?annotations[?'kubernetes.io/config.mirror'].hasValue()`,
}

func mutatingPolicy(o Options) (*admissionv1.MutatingAdmissionPolicy, error) {
	conditions := []admissionv1.MatchCondition{notMirror, {Name: "not-injected", Expression: "!" + celVolume}}
	for _, r := range rules(o.EgressPort) {
		conditions = append(conditions, admissionv1.MatchCondition{Name: "not-" + r.name, Expression: "!(" + r.cel + ")"})
	}
	mutations, err := mutations()
	if err != nil {
		return nil, err
	}
	return &admissionv1.MutatingAdmissionPolicy{
		TypeMeta:   typeMeta("MutatingAdmissionPolicy"),
		ObjectMeta: objectMeta(),
		Spec: admissionv1.MutatingAdmissionPolicySpec{
			FailurePolicy:      new(admissionv1.Fail),
			ReinvocationPolicy: admissionv1.NeverReinvocationPolicy,
			MatchConstraints:   created(metav1.LabelSelectorOpIn, Envoy, GRPC),
			MatchConditions:    conditions,
			Variables: []admissionv1.Variable{
				// The first one, so that a patch can replace it: /spec/variables/0.
				{Name: "image", Expression: quote(o.Image)},
				{Name: "annotations", Expression: `has(object.metadata.annotations) ? object.metadata.annotations : {}`},
				{Name: "envoy", Expression: strings.TrimSuffix(celEnvoy, " && ")},
				{Name: "limits", Expression: `variables.annotations.transformMapEntry(k, v, k in [` + quote(cpuLimitAnnotation) + `, ` + quote(memoryLimitAnnotation) +
					`], {(k == ` + quote(cpuLimitAnnotation) + ` ? 'cpu' : 'memory'): v})`},
			},
			Mutations: mutations,
		},
	}, nil
}

// mutations are lists of JSON patches, each of the pod as those before it left
// it.
func mutations() ([]admissionv1.Mutation, error) {
	sidecar, err := asMap[map[string]any](sidecar("", corev1.ResourceRequirements{}))
	if err != nil {
		return nil, err
	}
	sidecar["image"] = expression(`variables.annotations[?` + quote(imageAnnotation) + `].orValue(variables.image)`)
	sidecar["resources"] = expression(`{
  'requests': dyn({
    'cpu': variables.annotations[?` + quote(cpuRequestAnnotation) + `].orValue(` + quote(defaultCPURequest) + `),
    'memory': variables.annotations[?` + quote(memoryRequestAnnotation) + `].orValue(` + quote(defaultMemoryRequest) + `)
  }),
  ?'limits': size(variables.limits) > 0 ? optional.of(dyn(variables.limits)) : optional.none()
}`)
	volume, err := asMap[map[string]any](volume(), nil)
	if err != nil {
		return nil, err
	}
	mount, err := asMap[map[string]any](mount(), nil)
	if err != nil {
		return nil, err
	}
	env, err := asMap[[]any](program())
	if err != nil {
		return nil, err
	}

	patches := []string{
		`(has(object.spec.volumes) ? [] : [` + add(`'/spec/volumes'`, `[]`) + "]) + [\n  " + add(`'/spec/volumes/-'`, cel(volume, "  ")) + "\n]",
		`!variables.envoy ? [] : (has(object.spec.initContainers) ? [] : [` + add(`'/spec/initContainers'`, `[]`) + "]) + [\n  " +
			add(`'/spec/initContainers/0'`, cel(sidecar, "  ")) + "\n]",
	}
	for _, list := range []string{"initContainers", "containers"} {
		path := func(rest string) string { return `'/spec/` + list + `/' + string(i) + '/` + rest + `'` }
		all := func(of, value string) string {
			return `object.spec.` + list + `.transformList(i, c, ` + of + `JSONPatch{op: 'add', path: ` + value + `})`
		}
		var parts []string
		for _, field := range []struct {
			name string
			add  []any
		}{{"env", env}, {"volumeMounts", []any{mount}}} {
			// An empty list does not outlive a mutation: both are one.
			parts = append(parts, all(`!has(c.`+field.name+`), `, path(field.name)+`, value: []`))
			for _, v := range field.add {
				parts = append(parts, all("", path(field.name+"/-")+`, value: `+cel(v, "  ")))
			}
		}
		patches = append(patches, `variables.envoy || !has(object.spec.`+list+") ? [] :\n  "+strings.Join(parts, " +\n  "))
	}
	return mapped(patches, func(p string) admissionv1.Mutation {
		return admissionv1.Mutation{PatchType: admissionv1.PatchTypeJSONPatch, JSONPatch: &admissionv1.JSONPatch{Expression: p}}
	}), nil
}

func add(path, value string) string {
	return `JSONPatch{op: 'add', path: ` + path + `, value: ` + value + `}`
}

func validatingPolicy(o Options) *admissionv1.ValidatingAdmissionPolicy {
	var validations []admissionv1.Validation
	deny := func(cel, message, container string) {
		v := admissionv1.Validation{Expression: "!(" + cel + ")", Message: message}
		if before, after, ok := strings.Cut(message, "%s"); ok {
			v.Message = strings.ReplaceAll(message, "%s ", "")
			v.MessageExpression = quote(before) + " + " + container + " + " + quote(after)
		}
		validations = append(validations, v)
	}
	for _, r := range rules(o.EgressPort) {
		deny(r.cel, r.message, r.container)
	}
	for _, m := range meshes {
		if cel := m.celByNamespace(); cel != "" {
			deny(cel, m.namespaceMessage(), "")
		}
	}
	deny(celLabel+` in ['envoy', 'grpc'] && !`+celVolume,
		"the pod asks for injection and comes without: the MutatingAdmissionPolicy "+PolicyName+" is not there, or not active yet", "")
	return &admissionv1.ValidatingAdmissionPolicy{
		TypeMeta:   typeMeta("ValidatingAdmissionPolicy"),
		ObjectMeta: objectMeta(),
		Spec: admissionv1.ValidatingAdmissionPolicySpec{
			FailurePolicy:    new(admissionv1.Fail),
			MatchConstraints: created(metav1.LabelSelectorOpNotIn, Never),
			MatchConditions:  []admissionv1.MatchCondition{notMirror},
			Validations:      validations,
		},
	}
}

// expression is CEL that stands in a value as it is.
type expression string

// cel writes a JSON value as CEL. The values of a map are all made dyn: the API
// server wants those of one map to be of one type. What is on lines of its own
// begins with the indent.
func cel(v any, indent string) string {
	deeper := indent + "  "
	switch v := v.(type) {
	case expression:
		return strings.ReplaceAll(string(v), "\n", "\n"+indent)
	case string:
		return quote(v)
	case bool:
		return strconv.FormatBool(v)
	case json.Number:
		return v.String()
	case []any:
		if len(v) == 0 {
			return "[]"
		}
		return "[\n" + deeper + strings.Join(mapped(v, func(e any) string { return "dyn(" + cel(e, deeper) + ")" }), ",\n"+deeper) + "\n" + indent + "]"
	case map[string]any:
		keys := slices.Sorted(maps.Keys(v))
		return "{\n" + deeper + strings.Join(mapped(keys, func(k string) string { return quote(k) + ": dyn(" + cel(v[k], deeper) + ")" }), ",\n"+deeper) + "\n" + indent + "}"
	}
	panic(fmt.Sprintf("no CEL for %T", v))
}

// asMap is an API object as JSON sees it.
func asMap[M any](object any, err error) (m M, _ error) {
	if err != nil {
		return m, err
	}
	text, err := json.Marshal(object)
	if err != nil {
		return m, err
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	return m, d.Decode(&m)
}

func mapped[T, U any](list []T, f func(T) U) []U {
	out := make([]U, len(list))
	for i, v := range list {
		out[i] = f(v)
	}
	return out
}
