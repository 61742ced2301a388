/* Tests streamed replies: the syntax of each model family is parsed identically, however the stream is divided into chunks. */
#include "reply_events.h"
#include "test.h"

static const char TOOLS[] =
    "[{\"type\": \"function\", \"function\": {\"name\": \"weather\", \"parameters\": {\"type\": \"object\", "
    "\"properties\": {\"city\": {\"type\": \"string\"}, \"days\": {\"type\": \"integer\"}, \"detail\": "
    "{\"type\": \"boolean\"}}}}}]";

typedef struct reply_case {
    int reasoning;
    int tools;
    const char *prompt;
    const char *reply;
    const char *events;
    bool with_tools;
} reply_case;

enum {
    NO_R = FKV_REASONING_NONE,
    THINK = FKV_REASONING_THINK,
    BRACKETS = FKV_REASONING_BRACKETS,
    R_HARMONY = FKV_REASONING_HARMONY,
    CHANNEL = FKV_REASONING_CHANNEL,
    NO_T = FKV_TOOLS_NONE,
    JSON = FKV_TOOLS_JSON,
    PARAMETERS = FKV_TOOLS_PARAMETERS,
    MISTRAL = FKV_TOOLS_MISTRAL,
    LLAMA = FKV_TOOLS_LLAMA,
    T_HARMONY = FKV_TOOLS_HARMONY,
    GEMMA = FKV_TOOLS_GEMMA,
    ARG_KEYS = FKV_TOOLS_ARG_KEYS,
    KIMI = FKV_TOOLS_KIMI,
    PYTHONIC = FKV_TOOLS_PYTHONIC,
    INVOKE = FKV_TOOLS_INVOKE
};

static const reply_case CASES[] = {
    /* plain text */
    {NO_R, NO_T, "", " a <think> b </think>\n {\"name\": 1} \n", "T( a <think> b </think>\n {\"name\": 1} \n)"},
    {NO_R, NO_T, "", "", ""},
    {NO_R, NO_T, "", "caf\xc3\xa9 \xf0\x9f\x98\x80 \xff\xc3(\xed\xa0\x80 \xe2\x82",
     "T(caf\xc3\xa9 \xf0\x9f\x98\x80 \xef\xbf\xbd\xef\xbf\xbd(\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd \xef\xbf\xbd)"},
    /* <think> */
    {THINK, NO_T, "", "<think>\nhm, 2 < 3\n</think>\n\nIt is 3.\n", "R(hm, 2 < 3)T(It is 3.\n)"},
    {THINK, NO_T, "", "  \n<think>a</think>b", "R(a)T(b)"},
    {THINK, NO_T, "<|im_start|>assistant\n<think>\n", "a\n\nb</think>\nc", "R(a\n\nb)T(c)"},
    {THINK, NO_T, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "no thought", "T(no thought)"},
    {THINK, NO_T, "say <think> twice<|im_end|>assistant\n", "a", "T(a)"},
    {THINK, NO_T, "", "<think>never closed </thin", "R(never closed </thin)"},
    {THINK, NO_T, "", "The tag <think> opens it.", "T(The tag <think> opens it.)"},
    {BRACKETS, NO_T, "", "[THINK]a [b] c[/THINK]d", "R(a [b] c)T(d)"},
    /* JSON in <tool_call> */
    {THINK, JSON, "",
     "<think>\nask\n</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Br\\u00fcnn "
     "</tool_call> {\", \"days\": [1, {\"a\": 2}]}}\n</tool_call>\n<tool_call>\n{\"name\": \"b\", \"arguments\": {}}\n</tool_call>",
     "R(ask)T(Let me see.)C(weather)A({\"city\": \"Br\\u00fcnn </tool_call> {\", \"days\": [1, {\"a\": 2}]})EC(b)A({})E"},
    {NO_R, JSON, "", "<tool_call>{\"arguments\": {\"x\": 1}, \"id\": 7, \"name\": \"f\\u0041\\ud83d\\ude00\"}</tool_call> done",
     "C(fA\xf0\x9f\x98\x80)A({\"x\": 1})ET(done)"},
    {NO_R, JSON, "", "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"x\\\": \\\"a\\\\n\\\"}\"}</tool_call>",
     "C(f)A({\"x\": \"a\\n\"})E"},
    {NO_R, JSON, "", "<tool_call>{\"name\": \"f\"}</tool_call>", "C(f)A({})E"},
    {NO_R, JSON, "", "write <tool_call> around it", "T(write <tool_call> around it)"},
    {NO_R, JSON, "", "x\n<tool_call>\n{\"nam", "T(x\n<tool_call>\n{\"nam)"},
    {NO_R, JSON, "", "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": [1", "C(f)A({\"a\": [1)E!"},
    {NO_R, JSON, "", "<tool_call>{\"name\": 5}</tool_call>", "T(<tool_call>{\"name\": 5}</tool_call>)"},
    {NO_R, JSON, "", "<tool_call></tool_call>", "T(<tool_call></tool_call>)"},
    {NO_R, JSON, "", "<tool_call>[{\"name\": \"f\", \"arguments\": 5}, {\"name\": \"g\"}]</tool_call>", "C(f)A(5)EC(g)A({})E"},
    /* <function=><parameter=> */
    {NO_R, PARAMETERS, "",
     "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
     "<parameter=detail>\nTrue\n</parameter>\n<parameter=other>\na \"b\"\n\\c\n</parameter>\n</function>\n</tool_call>",
     "T(I look.)C(weather)A({\"city\": \"12\", \"days\": 3, \"detail\": true, \"other\": \"a \\\"b\\\"\\n\\\\c\"})E", true},
    {NO_R, PARAMETERS, "", "<function=f>\n</function>\n<function=g><parameter=a>[1, 2]</parameter></function></tool_call>ok",
     "C(f)A({})EC(g)A({\"a\": [1, 2]})ET(ok)"},
    {NO_R, PARAMETERS, "", "<tool_call>\n<function=f>\n<parameter=a>\n<html></html>\n", "C(f)A({\"a\": )E!"},
    /* Mistral */
    {NO_R, MISTRAL, "", "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": \"]\"}, \"id\": \"x\"}, {\"name\": \"g\"}]",
     "C(f)A({\"a\": \"]\"})EC(g)A({})E"},
    {BRACKETS, MISTRAL, "", "[THINK]t[/THINK]hm[TOOL_CALLS]f[CALL_ID]abc[ARGS]{\"a\": {}}[TOOL_CALLS]g[ARGS]{}",
     "R(t)T(hm)C(f)A({\"a\": {}})EC(g)A({})E"},
    {NO_R, MISTRAL, "", "[TOOL_CALLS] f{\"a\": 1} and", "C(f)A({\"a\": 1})ET(and)"},
    {NO_R, MISTRAL, "", "[TOOL] [TOOL_CALLS]", "T([TOOL] [TOOL_CALLS])"},
    /* Llama 3 */
    {NO_R, LLAMA, "", "{\"name\": \"weather\", \"parameters\": {\"city\": \"x\"}}", "C(weather)A({\"city\": \"x\"})E", true},
    {NO_R, LLAMA, "", "\n{\"type\": \"function\", \"name\": \"weather\", \"parameters\": {}}; {\"name\": \"weather\"}",
     "C(weather)A({})EC(weather)A({})E", true},
    {NO_R, LLAMA, "", "{\"name\": \"Bob\", \"age\": 3}", "T({\"name\": \"Bob\", \"age\": 3})", true},
    {NO_R, LLAMA, "", "{\"name\": \"weather\"}", "T({\"name\": \"weather\"})"},
    {NO_R, LLAMA, "", "<|python_tag|>{\"name\": \"f\", \"parameters\": {\"a\": 1}}", "C(f)A({\"a\": 1})E"},
    {NO_R, LLAMA, "", "so:<|python_tag|>print(\"a\")\nx", "T(so:)C(python)A({\"code\": \"print(\\\"a\\\")\\nx\"})E"},
    /* harmony */
    {R_HARMONY, T_HARMONY, "<|end|><|start|>assistant",
     "<|channel|>analysis<|message|>I think<|end|><|start|>assistant<|channel|>final<|message|>Hello <|x|>\n",
     "R(I think)T(Hello <|x|>)"},
    {R_HARMONY, T_HARMONY, "<|start|>assistant",
     "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"city\": \"x\"}",
     "C(weather)A({\"city\": \"x\"})E"},
    /* if the name of a tool is too long, its message is returned as text, and the next message is parsed as usual */
    {R_HARMONY, T_HARMONY, "<|start|>assistant",
     " to=aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
     "<|message|>{}<|end|><|start|>assistant<|channel|>analysis<|message|>hm<|end|>",
     "T({})R(hm)"},
    {R_HARMONY, T_HARMONY, "<|start|>assistant", " to=functions.f<|channel|>commentary json<|message|>{\"a\": 1<|call|>",
     "C(f)A({\"a\": 1)E!"},
    {R_HARMONY, T_HARMONY, "<|start|>assistant<|channel|>analysis<|message|>", "go on<|end|>", "R(go on)"},
    {R_HARMONY, T_HARMONY, "<|start|>assistant", "no messages here", "T(no messages here)"},
    {R_HARMONY, T_HARMONY, "", "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant<|channel|>analysis",
     "T(I will look.)"},
    /* Gemma 4 */
    {CHANNEL, GEMMA, "", "<|channel>thought\nhm\n<channel|>Yes.", "R(hm)T(Yes.)"},
    {CHANNEL, GEMMA, "<|turn>model\n<|channel>thought\n<channel|>", "Yes.", "T(Yes.)"},
    {CHANNEL, GEMMA, "",
     "Ok<|tool_call>call:f{city:<|\"|>San \"F\" {1}<|\"|>,n:-7,list:[1,<|\"|>a<|\"|>],deep:{a:true,b:word}}<tool_call|>"
     "<|tool_call>call:g{}<tool_call|>",
     "T(Ok)C(f)A({\"city\":\"San \\\"F\\\" {1}\",\"n\":-7,\"list\":[1,\"a\"],\"deep\":{\"a\":true,\"b\":\"word\"}})EC(g)A({})E"},
    {CHANNEL, GEMMA, "", "<|tool_call>f{a:1}<tool_call|>", "T(<|tool_call>f{a:1}<tool_call|>)"},
    {CHANNEL, GEMMA, "", "<|tool_call>call:f{a:1<tool_call|>x", "C(f)A({\"a\":)E!T(x)"},
    /* GLM */
    {THINK, ARG_KEYS, "",
     "<think>t</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>5</arg_value>\n<arg_key>days</arg_key>"
     "<arg_value>5</arg_value>\n</tool_call>",
     "R(t)C(weather)A({\"city\": \"5\", \"days\": 5})E", true},
    {NO_R, ARG_KEYS, "", "<tool_call>f</tool_call>", "C(f)A({})E"},
    {NO_R, ARG_KEYS, "", "<tool_call>f<arg_key>a</arg_key><arg_value>{\"b\": null}</arg_value></tool_call>",
     "C(f)A({\"a\": {\"b\": null}})E"},
    /* JSON tool calls without the opening tag */
    {THINK, JSON, "", "<think>t</think>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"x\"}}",
     "R(t)C(weather)A({\"city\": \"x\"})E", true},
    {NO_R, JSON, "", "\n{\"name\": \"weather\", \"arguments\": {}}\n</tool_call>", "C(weather)A({})E", true},
    {NO_R, JSON, "", "{\"name\": \"Bob\", \"age\": 3}", "T({\"name\": \"Bob\", \"age\": 3})", true},
    {NO_R, JSON, "", "{\"name\": \"weather\", \"arguments\": {}}", "T({\"name\": \"weather\", \"arguments\": {}})"},
    {NO_R, JSON, "", "So: {\"name\": \"weather\"}", "T(So: {\"name\": \"weather\"})", true},
    {NO_R, JSON, "", "{\"name\": \"weather\", \"arguments\": {\"city", "C(weather)A({\"city)E!", true},
    /* Kimi */
    {THINK, KIMI, "",
     "<think>t</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{\"city\":"
     " \"a<b\"}<|tool_call_end|>\n<|tool_call_begin|>g:1<|tool_call_argument_begin|> {} <|tool_call_end|><|tool_calls_section_end|>ok",
     "R(t)T(I look.)C(weather)A({\"city\": \"a<b\"})EC(g)A({})ET(ok)"},
    {NO_R, KIMI, "", "<|tool_call_begin|>functions.f<|tool_call_argument_begin|><|tool_call_end|>", "C(f)A({})E"},
    {NO_R, KIMI, "", "<|tool_calls_section_begin|>no", "T(<|tool_calls_section_begin|>no)"},
    {NO_R, KIMI, "", "<|tool_calls_section_begin|><|tool_calls_section_end|>",
     "T(<|tool_calls_section_begin|><|tool_calls_section_end|>)"},
    {NO_R, KIMI, "", "<|tool_call_begin|>:0<|tool_call_argument_begin|>{}",
     "T(<|tool_call_begin|>:0<|tool_call_argument_begin|>{})"},
    {NO_R, KIMI, "", "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{\"a\": [1<|tool_call_end|>x", "C(f)A({\"a\": [1)E!T(x)"},
    /* LFM2 */
    {NO_R, PYTHONIC, "",
     "<|tool_call_start|>[weather(city=\"Br\\u00fcnn's\", days=3, detail=True), g(), h(a=[1, -2.5e3, ('x', None,)], b = {'k': "
     "\"v\\n\", 'l': {}})]<|tool_call_end|>Checking.",
     "C(weather)A({\"city\": \"Br\xc3\xbcnn's\", \"days\": 3, \"detail\": true})EC(g)A({})EC(h)A({\"a\": [1, -2.5e3, [\"x\", "
     "null]], \"b\": {\"k\": \"v\\n\", \"l\": {}}})ET(Checking.)"},
    {NO_R, PYTHONIC, "", "<|tool_call_start|>f(a='it\\'s', b=word, c=)<|tool_call_end|>",
     "C(f)A({\"a\": \"it's\", \"b\": \"word\", \"c\": null})E"},
    {NO_R, PYTHONIC, "", "<|tool_call_start|>[f(1)]<|tool_call_end|>", "C(f)A({)E!T(]<|tool_call_end|>)"},
    {NO_R, PYTHONIC, "", "<|tool_call_start|>[f(a=1<|tool_call_end|>x", "C(f)A({\"a\": )E!T(x)"},
    {NO_R, PYTHONIC, "", "<|tool_call_start|>[f(a='x' 'y')]", "C(f)A({\"a\": \"x\")E!T(y')])"},
    {NO_R, PYTHONIC, "", "<|tool_call_start|>[]<|tool_call_end|>", "T(<|tool_call_start|>[]<|tool_call_end|>)"},
    {NO_R, PYTHONIC, "", "<|tool_call_start|>what? f(x)", "T(<|tool_call_start|>what? f(x))"},
    /* MiniMax */
    {THINK, INVOKE, "",
     "<think>\nt</think>\n<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">12</parameter>\n<parameter "
     "name=\"days\">3</parameter>\n</invoke>\n<invoke name=\"g\">\n</invoke>\n</minimax:tool_call>ok",
     "R(t)C(weather)A({\"city\": \"12\", \"days\": 3})EC(g)A({})ET(ok)", true},
    {NO_R, INVOKE, "", "<minimax:tool_call><invoke name=\"f\"><parameter name=\"a\">[1", "C(f)A({\"a\": )E!"},
    {NO_R, INVOKE, "", "<minimax:tool_call>\nno", "T(<minimax:tool_call>\nno)"},
};
enum { N_CASES = sizeof CASES / sizeof CASES[0] };

static reply_setup setup_of(const reply_case *c, json_t *tools) {
    return (reply_setup){.reasoning = (fkv_reasoning_syntax)c->reasoning,
                         .syntax = (fkv_tool_syntax)c->tools,
                         .tools = c->with_tools ? tools : NULL,
                         .prompt = c->prompt,
                         .n_prompt = strlen(c->prompt)};
}

static void check_cut(const reply_case *c, json_t *tools, size_t (*next)(void *), void *state, const char *how) {
    char *events = events_of(setup_of(c, tools), c->reply, strlen(c->reply), next, state);
    ck_assert_msg(strcmp(events, c->events) == 0, "%s\n divided %s:\n %s\n expected\n %s", c->reply, how, events, c->events);
    free(events);
}

static size_t one(void *state) {
    (void)state;
    return 1;
}

/* Returns the length of the next chunk: state[0] for the first chunk, state[1] for the second, and the rest of the reply for the
 * third. */
static size_t two_cuts(void *state) {
    size_t *cuts = state;
    size_t first = cuts[0];
    cuts[0] = cuts[1];
    cuts[1] = SIZE_MAX / 2;
    return first;
}

START_TEST(every_syntax_is_parsed_identically_for_any_division) {
    json_t *tools = json_loads(TOOLS, 0, NULL);
    for (size_t i = 0; i < N_CASES; i++) {
        const reply_case *c = &CASES[i];
        size_t n = strlen(c->reply);
        check_cut(c, tools, NULL, NULL, "not at all");
        check_cut(c, tools, one, NULL, "at every byte");
        for (size_t a = 1; a < n; a++)
            for (size_t b = 1; a + b <= n && (n <= 60 || b <= 3 || b == n - a); b++) {
                size_t cuts[2] = {a, b};
                check_cut(c, tools, two_cuts, cuts, "twice");
            }
    }
    json_decref(tools);
}
END_TEST

static uint32_t next_random(uint32_t *state) { return *state = *state * 1664525u + 1013904223u; }

static size_t random_part(void *state) { return 1 + (next_random(state) >> 16) % 9; }

/* Feeds random concatenations of parts of all cases, which are unexpected input for every parser. The events must be the same
 * however the stream is divided into chunks. */
START_TEST(mixed_replies_are_parsed_identically_for_any_division) {
    enum { ROUNDS = 4000, ROOM = 600 };
    json_t *tools = json_loads(TOOLS, 0, NULL);
    uint32_t state = 20261116;
    for (int round = 0; round < ROUNDS; round++) {
        char text[ROOM];
        size_t n = 0;
        for (int part = 0; part < 6; part++) {
            const char *from = CASES[next_random(&state) % N_CASES].reply;
            size_t length = strlen(from);
            if (length == 0) continue;
            size_t at = (next_random(&state) >> 8) % length;
            size_t take = 1 + (next_random(&state) >> 8) % (length - at);
            if (take > ROOM - n) take = ROOM - n;
            memcpy(text + n, from + at, take);
            n += take;
        }
        reply_case c = {.reasoning = (int)(1 + next_random(&state) % FKV_REASONING_CHANNEL),
                        .tools = (int)(1 + (next_random(&state) >> 8) % FKV_TOOLS_INVOKE),
                        .prompt = "",
                        .with_tools = round % 2 == 0};
        char *whole = events_of(setup_of(&c, tools), text, n, NULL, NULL);
        char *bytes = events_of(setup_of(&c, tools), text, n, one, NULL);
        char *parts = events_of(setup_of(&c, tools), text, n, random_part, &state);
        ck_assert_msg(strcmp(whole, bytes) == 0, "round %d: %s\nexpected %s", round, bytes, whole);
        ck_assert_msg(strcmp(whole, parts) == 0, "round %d: %s\nexpected %s", round, parts, whole);
        free(whole);
        free(bytes);
        free(parts);
    }
    json_decref(tools);
}
END_TEST

/* If a tool call begins but no name follows, all of its characters must be returned as text. A very long argument value is
 * returned as a string. */
START_TEST(held_text_is_bounded_and_never_lost) {
    enum { N = 3 * REPLY_HELD };
    static const struct {
        const char *opening;
        fkv_tool_syntax syntax;
        char filler;
    } rows[] = {{"<tool_call>{\"a\": \"", FKV_TOOLS_JSON, 'x'},
                {"<tool_call>", FKV_TOOLS_JSON, ' '},
                {"<tool_call><function=", FKV_TOOLS_PARAMETERS, 'x'},
                {"[TOOL_CALLS]f[CALL_ID]", FKV_TOOLS_MISTRAL, 'x'},
                {"<|tool_call>", FKV_TOOLS_GEMMA, 'x'},
                {"<tool_call>", FKV_TOOLS_ARG_KEYS, 'x'},
                {"<|tool_calls_section_begin|>", FKV_TOOLS_KIMI, '\n'},
                {"<|tool_calls_section_begin|><|tool_call_begin|>", FKV_TOOLS_KIMI, 'x'},
                {"<|tool_call_start|>[f", FKV_TOOLS_PYTHONIC, 'x'},
                {"<minimax:tool_call><invoke name=\"", FKV_TOOLS_INVOKE, 'x'},
                {"<tool_call>{\"arguments\": [", FKV_TOOLS_JSON, '['},
                {"<|python_tag|>", FKV_TOOLS_LLAMA, '\n'}};
    char *text = malloc(N + 64);
    ck_assert_ptr_nonnull(text);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        size_t n = strlen(rows[i].opening);
        memcpy(text, rows[i].opening, n);
        memset(text + n, rows[i].filler, N);
        reply_setup setup = {.reasoning = FKV_REASONING_NONE, .syntax = rows[i].syntax};
        char *events = events_of(setup, text, n + N, NULL, NULL);
        ck_assert_msg(strlen(events) == n + N + 3 && memcmp(events, "T(", 2) == 0 && memcmp(events + 2, text, n + N) == 0,
                      "%s: %zu bytes of events", rows[i].opening, strlen(events));
        free(events);
    }
    static const char before[] = "<tool_call>f<arg_key>k</arg_key><arg_value>";
    static const char after[] = "</arg_value></tool_call>";
    size_t n = strlen(before);
    memcpy(text, before, n);
    memset(text + n, '1', N - 100);
    memcpy(text + n + N - 100, after, strlen(after));
    reply_setup setup = {.reasoning = FKV_REASONING_NONE, .syntax = FKV_TOOLS_ARG_KEYS};
    char *events = events_of(setup, text, n + N - 100 + strlen(after), NULL, NULL);
    ck_assert(memcmp(events, "C(f)A({\"k\": \"111", 16) == 0);
    ck_assert_str_eq(events + strlen(events) - 7, "111\"})E");
    free(events);
    free(text);
}
END_TEST

static void nothing(void *user, const fkv_reply_event *event) {
    (void)user;
    (void)event;
}

/* Stop strings end a reply, however the stream is divided into chunks. Text that could be the beginning of a stop string is held
 * back, and returned if it turns out not to be one. */
START_TEST(stop_strings_end_a_reply) {
    static const struct {
        const char *stops[2];
        const char *reply;
        const char *events;
        bool stops_here;
    } rows[] = {{{"END", NULL}, "one END two", "T(one )", true},
                {{"END", "\n\n"}, "one EN\nEEND", "T(one EN\nE)", true},
                {{"aab", NULL}, "aaaab", "T(aa)", true},
                {{"abc", "b"}, "xabc", "T(xa)", true},
                {{"abd", "bc"}, "xabc", "T(xa)", true},
                {{"END", NULL}, "one EN", "T(one EN)", false},
                {{"</think>", NULL}, "<think>a</think>b", "R(a)", true}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        reply_setup setup = {.reasoning = FKV_REASONING_THINK,
                             .syntax = FKV_TOOLS_NONE,
                             .stop = rows[i].stops,
                             .n_stop = rows[i].stops[1] != NULL ? 2 : 1};
        size_t n = strlen(rows[i].reply);
        for (size_t cut = 1; cut <= n; cut++) {
            size_t cuts[2] = {cut, n};
            char *events = events_of(setup, rows[i].reply, n, two_cuts, cuts);
            ck_assert_str_eq(events, rows[i].events);
            free(events);
        }
        fkv_reply *reply = NULL;
        setup.on_event = nothing;
        ck_ok(fkv_reply_start(&setup, &reply));
        ck_ok(fkv_reply_feed(reply, rows[i].reply, n));
        ck_assert_int_eq(fkv_reply_stopped(reply), rows[i].stops_here);
        fkv_reply_close(reply);
    }
    ck_assert(!fkv_reply_stopped(NULL));
}
END_TEST

static bool no_token(const void *user, const char *text) {
    (void)user;
    (void)text;
    return false;
}

static bool one_token(const void *user, const char *text) { return strcmp(user, text) == 0; }

START_TEST(syntax_is_derived_from_the_template_or_the_tokens) {
    static const struct {
        const char *text;
        fkv_reasoning_syntax reasoning;
        fkv_tool_syntax tools;
    } rows[] = {{"{{ '<think>' }} <tool_call> {\"name\"", FKV_REASONING_THINK, FKV_TOOLS_JSON},
                {"<tool_call><function=x><parameter=y>", FKV_REASONING_NONE, FKV_TOOLS_PARAMETERS},
                {"split('</think>') <tool_call><arg_key>", FKV_REASONING_THINK, FKV_TOOLS_ARG_KEYS},
                {"<|start|>assistant<|channel|>", FKV_REASONING_HARMONY, FKV_TOOLS_HARMONY},
                {"<|channel>thought <|tool_call>call:", FKV_REASONING_CHANNEL, FKV_TOOLS_GEMMA},
                {"[THINK] [TOOL_CALLS]", FKV_REASONING_BRACKETS, FKV_TOOLS_MISTRAL},
                {"<|python_tag|>", FKV_REASONING_NONE, FKV_TOOLS_LLAMA},
                {"<think> <|tool_calls_section_begin|>", FKV_REASONING_THINK, FKV_TOOLS_KIMI},
                {"<minimax:tool_call><invoke name=\"", FKV_REASONING_NONE, FKV_TOOLS_INVOKE},
                {"<|im_start|>", FKV_REASONING_NONE, FKV_TOOLS_NONE},
                {"", FKV_REASONING_NONE, FKV_TOOLS_NONE}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        fkv_bytes text = {rows[i].text, strlen(rows[i].text)};
        ck_assert_int_eq(fkv_reply_reasoning_of(text, no_token, NULL), rows[i].reasoning);
        ck_assert_int_eq(fkv_reply_tools_of(text, no_token, NULL), rows[i].tools);
    }
    ck_assert_int_eq(fkv_reply_tools_of((fkv_bytes){"x", 1}, one_token, "<|python_tag|>"), FKV_TOOLS_LLAMA);
    ck_assert_int_eq(fkv_reply_tools_of((fkv_bytes){"x", 1}, one_token, "<|tool_call_start|>"), FKV_TOOLS_PYTHONIC);
    ck_assert_int_eq(fkv_reply_reasoning_of((fkv_bytes){"x", 1}, one_token, "<think>"), FKV_REASONING_THINK);
}
END_TEST

START_TEST(public_functions_reject_invalid_arguments) {
    fkv_model *model = NULL;
    fkv_reply *reply = NULL;
    fkv_model_config config = fkv_model_config_default();
    config.plan_only = true;
    ck_ok(fkv_model_load("models/needle", &config, &model));
    fkv_reply_config c = fkv_reply_config_default();
    ck_status(fkv_reply_open(model, &c, &reply), FKV_BAD_ARGUMENT);
    c.on_event = nothing;
    ck_status(fkv_reply_open(NULL, &c, &reply), FKV_BAD_ARGUMENT);
    c.tools = "[";
    c.n_tools = 1;
    ck_status(fkv_reply_open(model, &c, &reply), FKV_BAD_ARGUMENT);
    c.tools = NULL;
    const char *const empty[] = {""};
    c.stop = empty;
    c.n_stop = 1;
    ck_status(fkv_reply_open(model, &c, &reply), FKV_BAD_ARGUMENT);
    c.n_stop = FKV_MAX_STOPS + 1;
    ck_status(fkv_reply_open(model, &c, &reply), FKV_BAD_ARGUMENT);
    c.n_stop = 0;
    c.syntax.tools = (fkv_tool_syntax)99;
    ck_status(fkv_reply_open(model, &c, &reply), FKV_BAD_ARGUMENT);
    reply_events e = {.last = -1};
    const uint32_t prompt[] = {'<', 't', 'h', 'i', 'n', 'k', '>', '\n'};
    c = (fkv_reply_config){.syntax = {FKV_REASONING_THINK, FKV_TOOLS_NONE},
                           .prompt = prompt,
                           .n_prompt = sizeof prompt / sizeof prompt[0],
                           .on_event = events_take,
                           .user = &e};
    ck_ok(fkv_reply_open(model, &c, &reply));
    static const char reply_text[] = "hm</think>yes";
    for (const char *p = reply_text; *p != 0; p++) ck_ok(fkv_reply_token(reply, (uint32_t)*p));
    ck_ok(fkv_reply_end(reply));
    ck_ok(fkv_reply_end(reply));
    ck_status(fkv_reply_feed(reply, "x", 1), FKV_BAD_ARGUMENT);
    ck_assert_str_eq(e.bytes, "R(hm)T(yes)");
    free(e.bytes);
    fkv_reply_close(reply);
    fkv_reply_close(NULL);
    ck_assert_int_eq(fkv_reply_syntax_of(model).reasoning, FKV_REASONING_NONE);
    fkv_model_close(model);
}
END_TEST

TEST_MAIN("reply", every_syntax_is_parsed_identically_for_any_division, mixed_replies_are_parsed_identically_for_any_division,
          held_text_is_bounded_and_never_lost, stop_strings_end_a_reply, syntax_is_derived_from_the_template_or_the_tokens,
          public_functions_reject_invalid_arguments)
